"""The lead: who is there, who is lost, and the ballots that make the next generation.

Runs in:  the agent that leads, or that tries to. Pure.
Takes in: connections, promises, heartbeats, time.
Gives:    messages and dials, and through `Oversight` what the supervisor decides.
Survives: nothing, and need not: the next agent in order knows as much as the rest together.

Rule 1: one ballot at a time. Whoever is lost while it runs, and had a place in it, ends it, and
        the next one has a higher number.
Rule 2: a closed connection leads to one dial. Refused means dead; no answer means silent, and
        silence counts after the deadline.
Rule 3: a lead whose voters it does not hear could have been replaced: it holds its ranks before
        anybody could have done so.
"""

from dataclasses import dataclass, field

from ftrun.errors import ExitCode
from ftrun.ids import version
from ftrun.recovery.ballots import Ballot, electorate
from ftrun.recovery.commands import (
    Command,
    Dial,
    EndRun,
    Note,
    Send,
    StartGeneration,
    SupervisorCommand,
)
from ftrun.recovery.oversight import Oversight
from ftrun.recovery.places import NotEnough, assign
from ftrun.recovery.planning import make_plan
from ftrun.recovery.settings import ClusterSettings
from ftrun.wire.cluster import (
    Accepted,
    Announce,
    Beat,
    LeadBeat,
    NodeCard,
    NotPromised,
    Plan,
    Prepare,
    Promise,
)


@dataclass
class Peer:
    """What the lead knows of another agent, or of its own."""

    card: NodeCard
    heard_s: float
    linked: bool = False
    refused: bool = False
    lost: str = ""
    """Why it counts as lost; empty while it does not."""
    dialled_s: float = -1e9


@dataclass
class Lead:
    """One agent's leadership, from the moment it proposes itself."""

    me: NodeCard
    settings: ClusterSettings
    oversight: Oversight
    plan: Plan | None
    """The newest generation that is known to have taken effect."""
    unsure: Plan | None = None
    """A newer one that was accepted here, and may have."""
    peers: dict[str, Peer] = field(default_factory=dict)
    ballot: Ballot | None = None
    paused_since_s: float | None = None
    paused_why: str = ""
    ending: EndRun | None = None
    _again_s: float | None = None
    _again_why: str = ""
    _highest: int = -1
    _ended: set[str] = field(default_factory=set)
    _ending_since_s: float = 0.0
    _said: LeadBeat = field(default_factory=lambda: LeadBeat(generation=-1))
    _first_voters: list[NodeCard] = field(default_factory=list)

    # --- who is there -------------------------------------------------------------------------

    def add(self, card: NodeCard, *, now_s: float, linked: bool) -> list[Command]:
        """A node has come, or an agent was started again on one."""
        found: list[Command] = []
        old = self.peers.get(card.node_id)
        if old is not None and old.card.incarnation != card.incarnation and not old.lost:
            found += self._lose(old, "its agent was started again", now_s)
        if old is None or old.card.incarnation != card.incarnation or old.lost:
            self.peers[card.node_id] = Peer(card, now_s, linked)
            found.append(Note("NodeJoined", f"node {card.node_id} has come", {"host": card.host}))
        if self.ballot is not None:
            found += self._ask(self.peers[card.node_id])
        return found

    def opened(self, node_id: str, *, now_s: float) -> list[Command]:
        peer = self.peers.get(node_id)
        if peer is None:
            return []
        peer.linked, peer.refused, peer.heard_s = True, False, now_s
        return self._ask(peer)

    def closed(self, node_id: str, *, now_s: float) -> list[Command]:
        peer = self.peers.get(node_id)
        if peer is None or peer.lost:
            return []
        peer.linked, peer.dialled_s = False, now_s
        return [Dial(peer.card.host, peer.card.port, node_id)]

    def dial_failed(self, node_id: str, *, refused: bool, now_s: float) -> list[Command]:
        peer = self.peers.get(node_id)
        if peer is None or peer.linked:
            return []
        peer.refused |= refused
        if refused and not peer.lost:
            return self._lose(peer, "its agent is dead: the connection is refused", now_s)
        return self._check(now_s) if refused else []

    def heard(self, node_id: str, *, now_s: float) -> None:
        peer = self.peers.get(node_id)
        if peer is not None and not peer.lost:
            peer.heard_s = now_s

    def missed(self, gap_s: float) -> None:
        """This process itself stood still for so long: nobody else is late for it."""
        for peer in self.peers.values():
            peer.heard_s += gap_s

    def _lose(self, peer: Peer, why: str, now_s: float) -> list[Command]:
        node_id = peer.card.node_id
        peer.lost = why
        plan = self.plan
        was_member = plan is not None and plan.member(node_id) is not None
        found: list[Command] = [
            Note("NodeLost", f"node {node_id} is lost: {why}", {"member": was_member}, say=True)
        ]
        ballot = self.ballot
        if ballot is not None:
            if ballot.plan is not None and ballot.plan.member(node_id) is not None:
                return found + self.propose(f"node {node_id} is lost: {why}", now_s=now_s)
            ballot.promises.pop(node_id, None)
            return found + self._check(now_s)
        if was_member:
            found += self._decide(self.oversight.lost(node_id, why, now_s=now_s), now_s)
        return found

    # --- a ballot -----------------------------------------------------------------------------

    def succeed(self, lost: set[str], why: str, *, now_s: float) -> list[Command]:
        """Take over after the nodes that led before; or begin the first generation."""
        if self.plan is None:
            self._first_voters = [peer.card for peer in self.peers.values()]
            if self.unsure is not None:
                self.oversight.succeed(self.unsure.history, now_s=now_s)
            return self.propose(why, now_s=now_s)
        self.oversight.succeed(self.plan.history, now_s=now_s)
        found: list[Command] = []
        gone = sorted(lost & {node.node_id for node in self.plan.members})
        self.oversight.begin(self.plan, now_s=now_s)
        for node_id in gone:
            decided = self.oversight.lost(node_id, why, now_s=now_s)
            found += self._decide(decided, now_s)
        if self.ballot is None and self.ending is None:
            found += self.propose(why, now_s=now_s)
        return found

    def propose(self, why: str, *, now_s: float) -> list[Command]:
        """Begin a ballot for the next generation."""
        known = self.plan.generation if self.plan is not None else -1
        unsure = self.unsure if self.unsure and self.unsure.generation > known else None
        self._highest = max(self._highest, known, unsure.generation if unsure else -1) + 1
        if self.plan is not None:
            base = electorate(self.plan.voters)
        elif unsure is not None:
            known, base = unsure.decided_after, frozenset(unsure.decided_by)
        else:
            base = electorate(self._first_voters)
        self.ballot = Ballot(self._highest, why, known, base, now_s)
        if unsure is not None:
            self.ballot.maybe[unsure.generation] = electorate(unsure.voters)
        self._again_s = None
        found: list[Command] = [
            Note("Ballot", why, {"generation": self._highest, "voters": len(base)})
        ]
        for peer in self.peers.values():
            found += self._ask(peer)
        return found

    def promised(self, body: Promise, *, now_s: float) -> list[Command]:
        ballot = self.ballot
        if ballot is None or body.generation != ballot.generation or ballot.plan is not None:
            return []
        ballot.take_promise(body)
        for plan in (body.effective, body.accepted):
            if plan is not None:
                self._meet_voters(plan, now_s)
        return self._check(now_s)

    def not_promised(self, body: NotPromised, *, now_s: float) -> list[Command]:
        """Somebody has promised a higher number: begin again above it, a little later."""
        ballot = self.ballot
        if ballot is None or body.generation != ballot.generation:
            return []
        self._highest = max(self._highest, body.promised)
        if self._again_s is None:
            self._again_s = now_s + self._patience_s()
            self._again_why = ballot.why
        return []

    def accepted(self, node_id: str, body: Accepted, *, now_s: float) -> list[Command]:
        ballot = self.ballot
        if ballot is None or ballot.plan is None or body.generation != ballot.generation:
            return []
        ballot.accepted[node_id] = body
        return self._check(now_s)

    def _check(self, now_s: float) -> list[Command]:
        """Take the ballot as far as it goes."""
        ballot = self.ballot
        if ballot is None or self.ending is not None:
            return []
        refused = self._other_voter_refused()
        if ballot.plan is not None:
            if ballot.is_accepted(refused=refused):
                return self._take_effect(ballot, now_s)
            return []
        awaited = [
            peer
            for node_id, peer in self.peers.items()
            if not peer.lost and node_id not in ballot.promises
        ]
        if awaited:
            return []
        if not ballot.is_promised(refused=refused):
            return self._pause("not enough of the last generation's nodes answer", now_s)
        return self._announce(ballot, now_s)

    def _announce(self, ballot: Ballot, now_s: float) -> list[Command]:
        here = [promise.card for promise in ballot.promises.values()]
        newest = ballot.newest_plan()
        known = [plan for plan in (newest, self.plan, self.unsure) if plan is not None]
        previous = max(known, key=lambda plan: plan.generation, default=None)
        aside = self.oversight.set_aside(now_s=now_s)
        places = assign(here, previous, self.settings.wishes, aside)
        if isinstance(places, NotEnough):
            return self._pause(str(places), now_s)
        plan = make_plan(
            ballot,
            places,
            previous,
            self.settings,
            lead=self.me.node_id,
            history=self.oversight.history(now_s=now_s),
        )
        if isinstance(plan, EndRun):
            return self._end(plan, now_s)
        ballot.plan = plan
        self.paused_since_s = None
        return [Send(node_id, Announce(plan)) for node_id in ballot.promises]

    def _take_effect(self, ballot: Ballot, now_s: float) -> list[Command]:
        plan = ballot.plan
        assert plan is not None
        problems = [f"{n}: {a.problem}" for n, a in sorted(ballot.accepted.items()) if a.problem]
        if problems:
            return self._end(EndRun(ExitCode.STATE_LOST, "; ".join(problems)), now_s)
        restored = {ballot.accepted[node.node_id].restored for node in plan.members}
        if len(restored) > 1:
            return self._end(EndRun(ExitCode.STATE_LOST, _different(ballot)), now_s)
        self.plan, self.ballot = plan, None
        text = f"generation {plan.generation}: {len(plan.members)} nodes, {plan.world_size} ranks"
        note = Note("Generation", text, {"why": plan.why, "restored": str(plan.restore)})
        commands = self.oversight.begin(plan, now_s=now_s)
        notes = [note]
        if len(plan.voters) == 2 and plan.generation == 0:
            text = (
                "two nodes and no spare: where one does not answer, the other cannot know whether "
                "it is dead or cut off, and pauses. A spare (--spares 1) decides it"
            )
            notes.append(Note("TwoVoters", text, {}, say=True))
        return [*notes, *self._decide(commands, now_s), *self.heartbeat()]

    def _ask(self, peer: Peer) -> list[Command]:
        """Whatever this peer has to answer for the ballot to go on."""
        ballot, node_id = self.ballot, peer.card.node_id
        if ballot is None or (peer.lost and not peer.linked):
            return []
        if not peer.linked:
            return [Dial(peer.card.host, peer.card.port, node_id)]
        if ballot.plan is None and node_id not in ballot.promises:
            knows = self.plan.generation if self.plan is not None else -1
            return [Send(node_id, Prepare(ballot.generation, self.me, ballot.why, knows))]
        is_asked = ballot.plan is not None and node_id in ballot.promises
        if ballot.plan is not None and is_asked and node_id not in ballot.accepted:
            return [Send(node_id, Announce(ballot.plan))]
        return []

    def _meet_voters(self, plan: Plan, now_s: float) -> None:
        """There are voters whom this lead did not know of."""
        for card in plan.voters:
            if card.node_id not in self.peers:
                self.peers[card.node_id] = Peer(card, now_s)

    def _other_voter_refused(self) -> bool:
        """Whether all voters but this agent are dead, by the word of their kernels."""
        others = [peer for node_id, peer in self.peers.items() if node_id != self.me.node_id]
        return any(peer.refused for peer in others) and all(p.refused or p.linked for p in others)

    def _patience_s(self) -> float:
        """Two proposers wait for different times, by their place in the order."""
        order = [card.node_id for card in self.plan.voters] if self.plan is not None else []
        place = order.index(self.me.node_id) if self.me.node_id in order else len(order)
        return 0.1 + 0.2 * place

    # --- a generation -------------------------------------------------------------------------

    def beat(self, node_id: str, body: Beat, *, now_s: float) -> list[Command]:
        if body.state == "ended":
            self._ended.add(node_id)
        ballot, known = self.ballot, self.plan.generation if self.plan is not None else -1
        found = self._decide(self.oversight.beat(node_id, body, now_s=now_s), now_s)
        if ballot is None and self.ballot is None and body.promised > max(known, self._highest):
            # It was promised away, and has no ranks any more; its proposer is no lead yet.
            self._highest = body.promised
            self._again_s = now_s + self._patience_s()
            self._again_why = f"node {node_id} has promised generation {body.promised} to another"
        return found

    def heartbeat(self) -> list[Command]:
        """How things are, to everyone who is here."""
        orders = self.oversight.orders
        known = self.plan.generation if self.plan is not None else -1
        body = orders if orders.generation == known else LeadBeat(generation=known)
        if self.ending is not None:
            body = orders
        self._said = orders
        return [Send(node_id, body) for node_id, peer in self.peers.items() if peer.linked]

    def passing(self, *, now_s: float) -> list[Command]:
        """What is due."""
        found: list[Command] = []
        for node_id, peer in list(self.peers.items()):
            if node_id != self.me.node_id:
                found += self._watch(peer, now_s)
        if self._again_s is not None and now_s >= self._again_s and self.ending is None:
            found += self.propose(self._again_why, now_s=now_s)
        if self.ballot is None and self.ending is None:
            found += self._decide(self.oversight.passing(now_s=now_s), now_s)
        if self.paused_since_s is not None and self.ending is None:
            waited_s = now_s - self.paused_since_s
            if waited_s >= self.settings.pause_limit_s:
                why = f"{self.paused_why}, for {waited_s:.0f} s"
                found += self._end(EndRun(ExitCode.NOT_ENOUGH_NODES, why), now_s)
        return found + self._finish(now_s)

    def may_be_replaced(self, *, now_s: float) -> bool:
        """Whether those that this lead does not hear could decide without it."""
        plan = self.plan
        if plan is None:
            return False
        limit_s = self.settings.cut_off_s
        unheard = sum(
            card.node_id not in self.peers or now_s - self.peers[card.node_id].heard_s >= limit_s
            for card in plan.voters
            if card.node_id != self.me.node_id
            and not (card.node_id in self.peers and self.peers[card.node_id].refused)
        )
        return 2 * unheard > len(plan.voters)

    def _watch(self, peer: Peer, now_s: float) -> list[Command]:
        silent_s = now_s - peer.heard_s
        found: list[Command] = []
        if not peer.lost and silent_s >= self.settings.deadline_s:
            found += self._lose(peer, f"silent for {silent_s:.1f} s", now_s)
        is_wanted = not peer.lost or self.paused_since_s is not None
        if is_wanted and not peer.linked and now_s - peer.dialled_s >= self.settings.redial_s:
            peer.dialled_s = now_s
            found.append(Dial(peer.card.host, peer.card.port, peer.card.node_id))
        return found

    def _decide(self, commands: list[SupervisorCommand], now_s: float) -> list[Command]:
        """Carry out the supervisor's commands, as far as they are the lead's to carry out."""
        found: list[Command] = []
        for command in self.oversight.stands_for(commands):
            if isinstance(command, StartGeneration) and self.ballot is None:
                found += self.propose(command.why, now_s=now_s)
            elif isinstance(command, EndRun):
                found += self._end(command, now_s)
        # What all are to do does not wait for the next heartbeat: a commit is one of it.
        return found + (self.heartbeat() if self.oversight.orders != self._said else [])

    def _pause(self, why: str, now_s: float) -> list[Command]:
        if self.paused_since_s is None:
            self.paused_since_s = now_s
        if why == self.paused_why:
            return []
        self.paused_why = why
        limit_s = self.settings.pause_limit_s
        text = f"PAUSED: {why}; gives up after {limit_s:.0f} s"
        return [Note("Paused", text, {}, say=True)]

    def _end(self, command: EndRun, now_s: float) -> list[Command]:
        if self.ending is not None:
            return []
        self.ending, self.ballot, self._ending_since_s = command, None, now_s
        self.oversight.end(command)
        return self.heartbeat()

    def _finish(self, now_s: float) -> list[Command]:
        """End here too, once all have heard that it is over, or have had the time to."""
        if self.ending is None:
            return []
        here = {node_id for node_id, peer in self.peers.items() if peer.linked and not peer.lost}
        others = here - {self.me.node_id} - self._ended
        waited_s = now_s - self._ending_since_s
        if others and waited_s < 2 * self.settings.deadline_s:
            return []
        return [self.ending]


def _different(ballot: Ballot) -> str:
    found = ", ".join(
        f"{node_id} {version(*has.restored) if has.restored else 'nothing'}"
        for node_id, has in sorted(ballot.accepted.items())
    )
    return f"the nodes do not read the same checkpoint: {found}. Give all the same --checkpoint-dir"
