"""Gathers the nodes of the first generation, and limits the wait for a run to begin.

Rule 1: it waits for a leader that may look for it (see `MembershipSettings.blank_wait_s`). An
        agent that was restarted at the endpoint must find its run and not start another.
Rule 2: if a node that joins has a plan of a run, no run is started here: that node proposes itself.
Rule 3: if the witness remembers a run, all nodes that had a vote in it must be present and
        have no plan of a run: then it is over.
"""

from ftrun.config.cluster import MembershipSettings
from ftrun.errors import ExitCode
from ftrun.records.membership import WaitingForNodes
from ftrun.recovery.commands import Command, EndRun, JournalEntry, Send
from ftrun.wire.cluster.generation import NodeCard
from ftrun.wire.cluster.membership import Join, JoinPending, JoinRejected


class InitialQuorum:
    """The nodes present so far, this node included.

    The agent that listens at the rendezvous endpoint, or that has the claim at the witness, has it
    while it has no plan of a run.
    """

    def __init__(self, me: NodeCard, settings: MembershipSettings, *, now_s: float) -> None:
        self.cards: dict[str, NodeCard] = {me.node_id: me}
        self._me = me
        self._settings = settings
        self._started_s = self._last_came_s = now_s
        self.remembered: frozenset[str] = frozenset()
        """Nodes that had a vote in the run that the witness remembers."""
        self._knowing: set[str] = set()
        """Nodes with a plan of a run."""

    def join(self, sender: str, body: Join, *, now_s: float) -> list[Command]:
        card = body.card
        if card.node_id == self._me.node_id:
            return [Send(sender, JoinRejected(_taken(card, self._me)))]
        here = self.cards.get(card.node_id)
        if here is not None and here.incarnation != card.incarnation and here.host != card.host:
            return [Send(sender, JoinRejected(_taken(card, here)))]
        if here != card:
            self._last_came_s = now_s
        self.cards[card.node_id] = card
        if body.knows >= 0:
            self._knowing.add(card.node_id)
        size = self._settings.cluster_size
        return [Send(sender, JoinPending(sorted(self.cards), size.max_nodes + size.spares))]

    def gone(self, node_id: str) -> None:
        self.cards.pop(node_id, None)
        self._knowing.discard(node_id)

    def was_paused(self, gap_s: float) -> None:
        """A leader could not look for this process during a pause of it: rule 1."""
        self._started_s += gap_s
        self._last_came_s += gap_s

    def is_complete(self, *, now_s: float) -> bool:
        """Whether the first generation may begin.

        It begins at once with all requested nodes. With at least `min_nodes` it begins when no node
        has joined for `last_call_timeout_s`.
        """
        if self._knowing or now_s - self._started_s < self._settings.blank_wait_s:
            return False
        if not self.remembered <= self.cards.keys():
            return False
        size, here = self._settings.cluster_size, len(self.cards)
        if here >= size.max_nodes + size.spares:
            return True
        waited_s = now_s - self._last_came_s
        return here >= size.min_nodes and waited_s >= self._settings.times.last_call_timeout_s

    def missing(self) -> str:
        names, cluster_size = sorted(self.cards), self._settings.cluster_size
        verb = "is" if len(names) == 1 else "are"
        away = sorted(self.remembered - self.cards.keys())
        if away:
            return (
                f"{', '.join(names)} {verb} present. A run of this id exists, which "
                f"{', '.join(away)} may resume. Start ftrun there too, or choose another --rdzv-id"
            )
        return f"{', '.join(names)} {verb} present, and {cluster_size.min_nodes} nodes are needed"


def _taken(card: NodeCard, here: NodeCard) -> str:
    return (
        f"{here.host} and {card.host} are both named {card.node_id}. Name each node differently "
        "with --node-id"
    )


REPORT_EVERY_S = 15.0
"""Seconds between two lines about what a start is waiting for."""


class JoinTimeout:
    """The wait of one agent for its run."""

    def __init__(self, settings: MembershipSettings, *, now_s: float) -> None:
        self._settings = settings
        self._report_due_s = now_s + REPORT_EVERY_S

    def wait(self, waited_s: float, reach: str, *, gathers: bool, now_s: float) -> list[Command]:
        """Reports what is waited for, or ends the run; `gathers`: others join this agent."""
        if waited_s >= self._settings.times.join_timeout_s:
            code = ExitCode.NOT_ENOUGH_NODES if gathers else ExitCode.TRY_AGAIN
            reason = self._no_node_joins if gathers else self._not_admitted
            return [EndRun(code, reason(waited_s, reach))]
        if now_s < self._report_due_s or waited_s < REPORT_EVERY_S:
            return []
        self._report_due_s = now_s + REPORT_EVERY_S
        text = f"waiting for {waited_s:.0f} s: {reach}"
        return [JournalEntry(WaitingForNodes(text), announce=True)]

    def _no_node_joins(self, waited_s: float, reach: str) -> str:
        port = next((port for _, port in self._settings.endpoints), 0)
        if self._settings.has_witness:
            return _not_met(f"the run has not started within {waited_s:.0f} s", reach)
        return (
            f"the run has not started within {waited_s:.0f} s: {reach}. Check that ftrun runs on "
            f"the others, with the same --rdzv-endpoint and --rdzv-id, and that port {port} of "
            "this node is open to them"
        )

    def _not_admitted(self, waited_s: float, reach: str) -> str:
        endpoints = self._settings.endpoints
        host = " or ".join(host for host, _ in endpoints)
        port = " or ".join(dict.fromkeys(str(port) for _, port in endpoints))
        if self._settings.has_witness:
            return _not_met(f"no run has accepted this node within {waited_s:.0f} s", reach)
        return (
            f"no run has accepted this node within {waited_s:.0f} s: {reach}. Check that ftrun "
            f"runs on {host}, that it was given the same --rdzv-endpoint, and that port {port} is "
            "open between the nodes"
        )


def _not_met(what: str, reach: str) -> str:
    return (
        f"{what}: {reach}. Check that ftrun runs on the others, with the same etcd in "
        "--rdzv-endpoint and the same --rdzv-id, and that the nodes reach one another"
    )
