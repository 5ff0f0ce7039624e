"""Protects versions within a group, from the local seals until any m nodes may be lost.

Runs in:  the SMP: decisions in the server thread, bytes in the threads of the links.
Takes in: versions that all local ranks have sealed; messages of the other SMPs of the group.
Gives:    VersionReady to the agent; mirrors and parity in the parity regions.
Survives: nothing by itself. A new SMP finds the slots and the parity regions, and starts the
          protection again.

    all local ranks have sealed it -> RoundSealed, ManifestData -> a plan
    -> RoundOpened, blocks, mirrors -> all parts stored -> RoundStored -> from all n nodes: ready

Rule 1: a version is ready when every node of the group has sent RoundStored. Then every mirror and
        every parity row is in its place, and all replicas were equal.
Rule 2: after a lost connection the version starts a new attempt, and nodes drop the previous one.
Rule 3: if each node of the group has its complete part already (a rank or SMP crashed), nothing is
        sent.
Rule 4: a node that cannot store its part reports the reason. The version is then ready without
        protection against the loss of a node. Training continues, and the status shows UNPROTECTED.
Rule 5: after the SMP reports its inventory for the next generation plan, it begins nothing and
        overwrites nothing until that generation begins.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from ftrun import clock
from ftrun.erasure.codec import Codec
from ftrun.errors import LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Rank, Version, version
from ftrun.smp.jobs import Finish, IntervalTimer
from ftrun.smp.memory.replicas import NodeContents, ReplicaMonitor
from ftrun.smp.memory.sealed_shards import SealedShards
from ftrun.smp.peer_link import PROTECT, OutgoingFrame
from ftrun.smp.redundancy.exchange import ProtectorTools
from ftrun.smp.redundancy.group import GroupNotices, LocalGroup, rooms_for
from ftrun.smp.redundancy.parity_writer import ParityWriter
from ftrun.smp.redundancy.rounds import ProtectionRound, ProtectionRounds
from ftrun.snapshot.manifest import NodeManifest
from ftrun.snapshot.plan_agreement import GroupPlan
from ftrun.snapshot.redundancy import RedundancyPlan
from ftrun.wire.cluster import transfer as t
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.transport.bulk_socket import digest_of

MAX_ATTEMPTS = 8
"""Limit of attempts at a version because of damaged blocks."""

_LINKS_EVERY_S = 1.0


class Protector:
    """All versions of one generation that are being protected.

    `corrupt` reports that a slot of a version differs from what was sealed, with the reason. It
    returns whether the version was abandoned because of it. `replicas` are those of this node.
    """

    def __init__(
        self,
        tools: ProtectorTools,
        *,
        corrupt: Callable[[Version, str], bool],
        replicas: ReplicaMonitor,
    ) -> None:
        self.group: LocalGroup | None = None
        self.last_s = 0.0
        self.last_bytes = 0
        self._tools = tools
        self._peers = tools.peers
        self._parity_store = tools.parity_store
        self._send_to_agent = tools.send_to_agent
        self._corrupt = corrupt
        self._replicas = replicas
        self._rounds = ProtectionRounds()
        self._plan: GroupPlan | None = None
        self._rooms: dict[int, int] = {}
        self._codec: Codec | None = None
        self._is_still = False
        self._committed: Version | None = None
        self._notices = GroupNotices(tools.send_to_agent)
        self._watch = IntervalTimer(tools.jobs, self._poll)
        self._unreachable: list[str] = []
        self._link_watch = IntervalTimer(tools.jobs, self._check_links)

    # --- server thread: calls from the coordinator and the commits ---------------------------

    def begin(self, group: LocalGroup | None) -> None:
        self.stop()
        self._is_still = False
        self.group = group
        self._committed = self._rounds.over = None
        self._plan = None
        self._rooms = {}
        self._set_unreachable([])
        self._notices.clear()
        if group is not None and group.is_possible:
            self._codec = self._tools.codecs.get(group.protection.data, group.parity)
            self._plan = GroupPlan(
                position=group.position,
                num_nodes=len(group.nodes),
                parity=group.parity,
                small_state_bytes=group.small_state_bytes,
                is_ring=group.is_ring,
            )
            for position in group.others:
                self._peers.link(position, PROTECT)
            self._watch.start(group.timeout_s)
            self._link_watch.start(_LINKS_EVERY_S)

    def stop(self) -> None:
        self._watch.stop()
        self._link_watch.stop()
        self._rounds.stop()

    def freeze_versions(self) -> None:
        """Change nothing until the next generation begins (rule 5)."""
        self._is_still = True
        self.stop()

    def protect(self, wanted: Version, fds: Mapping[Rank, Sequence[int]]) -> None:
        """Protect the newest version, which every local rank has sealed or holds (arenas `fds`)."""
        group = self.group
        assert group is not None
        if self._is_still:
            return
        self._rounds.drop(lambda other: other < wanted)
        round_ = self._rounds.of(wanted)
        if round_.is_sealed:
            if round_.is_ready:
                self._report_ready(round_)  # the agent repeated BeginGeneration
            return
        round_.started_s = clock.now_s()
        round_.is_sealed = True
        if not group.is_possible:
            reason = (
                f"{len(group.nodes)} node(s) cannot protect each other with parity {group.parity}"
            )
            self._ready(round_, reason)
            return
        if round_.problem:
            self._give_up(round_, round_.problem)
            return
        shards = self._tools.maps.hold(fds, wanted)
        self._tools.jobs.submit(
            "protect",
            partial(self._describe, round_, shards, sorted(fds)),
            failed=partial(self._unable, round_, "internal error in ftrun; see the SMP's log"),
        )

    def is_ready(self, wanted: Version) -> bool:
        round_ = self._rounds.find(wanted)
        return round_ is not None and round_.was_ready

    def abandon(self, newest: Version) -> None:
        self._rounds.drop(lambda other: other.generation == newest.generation and other <= newest)

    def void_after(self, newest: Version) -> None:
        self._rounds.drop(lambda other: other > newest, is_over=False)

    def committed(self, newest: Version) -> None:
        """Commit the protection of this version, and end the rounds up to it."""
        if self.group is None:
            return
        self._committed = newest
        round_ = self._rounds.find(newest)
        if round_ is not None and not round_.is_ready and not round_.problem:
            # A new attempt has started, see `_ready`. Nodes that were ready have dropped the
            # version, so the attempt may never end. A complete part is committed now, because the
            # next version would overwrite it otherwise.
            part = self._own_part(newest)
            if part >= 0 and (round_.exchange is None or part == round_.protected_in):
                self._commit_part(newest, part)
            return
        part = round_.protected_in if round_ is not None else self._own_part(newest)
        self._commit_part(newest, part)
        self._rounds.drop(lambda other: other <= newest)

    def _commit_part(self, newest: Version, protected_in: int) -> None:
        for slot in self._parity_store.commit(newest, protected_in):
            self._send_to_agent(smp_messages.ParityRegionFreed(slot))

    def decide_shares(self, committed: Version) -> None:
        """Begin or end to share replicas, as all nodes of the group do at this version."""
        group, round_ = self.group, self._rounds.find(committed)
        if group is None:
            self._replicas.decide(is_agreed=True)
        elif round_ is not None and len(round_.shares) == len(group.nodes):
            stated = set(round_.shares.values())
            self._replicas.decide(is_agreed=len(stated) == 1 and stated != {0})

    def status(self) -> dict[str, object]:
        group = self.group
        if group is None:
            return {"group": None}
        return {
            "group": [node.node_id for node in group.nodes],
            "parity": group.parity,
            "under_way": [one.status(group.nodes) for one in self._rounds],
            "last_protect_s": self.last_s,
            "last_protect_bytes": self.last_bytes,
        }

    # --- own part ----------------------------------------------------------------------------

    def _describe(
        self, round_: ProtectionRound, shards: SealedShards, ranks: Sequence[Rank]
    ) -> Finish:
        """Build this node's manifest; runs in a job."""
        try:
            manifest = shards.manifest(ranks)
            contents = self._replicas.contents_of(shards)
        except (LayoutUnknown, SnapshotCorrupt) as error:
            return partial(self._failed, round_, str(error), is_corrupt=True)
        return partial(self._described, round_, shards, manifest, contents)

    def _described(
        self,
        round_: ProtectionRound,
        shards: SealedShards,
        manifest: NodeManifest,
        contents: NodeContents,
    ) -> None:
        if not self._rounds.is_current(round_):
            return
        round_.shards, round_.manifest = shards, manifest
        round_.own_shares = self._replicas.statement(contents)
        self._report_sealed(round_)
        problem = self._tools.codecs.problem(self._codec) if self._codec is not None else ""
        if problem:
            self._unable(round_, problem)
        self._advance(round_)

    def _report_sealed(self, round_: ProtectionRound) -> None:
        group, group_plan = self.group, self._plan
        assert group is not None
        assert group_plan is not None
        assert round_.manifest is not None
        plan_id, replicas = group_plan.report(round_.manifest)
        part = self._own_part(round_.version)
        round_.reported[group.position] = (plan_id, replicas)
        round_.parts[group.position] = part
        round_.shares[group.position] = round_.own_shares
        round_.manifests[group.position] = round_.manifest
        crash_point("smp.protect.described")
        digests = [[(int(r), d) for r, d in one] for one in replicas]
        body = t.RoundSealed(*self._name(round_), plan_id, digests, part, round_.own_shares)
        self._send_to_all(body)
        if not plan_id and part < 0:
            self._send_manifest(round_)

    def _own_part(self, wanted: Version) -> int:
        """Return the generation of this node's complete part of this protection, or -1."""
        assert self.group is not None
        return self.group.whole_part(wanted, self._parity_store.parts())

    def _send_manifest(self, round_: ProtectionRound) -> None:
        if not round_.manifest_is_sent:
            round_.manifest_is_sent = True
            raw = msgspec.msgpack.encode(round_.manifest)
            self._send_to_all(t.ManifestData(*self._name(round_)), raw)

    def _advance(self, round_: ProtectionRound) -> None:
        group, group_plan = self.group, self._plan
        if group is None or group_plan is None or round_.manifest is None:
            return
        is_pending = round_.exchange is None and not round_.is_ready
        if not is_pending or len(round_.reported) < len(group.nodes):
            return
        parts = set(round_.parts.values())
        if len(parts) == 1 and parts != {-1}:
            round_.protected_in = parts.pop()
            self._ready(round_)
            return
        resolved = group_plan.resolve(round_.reported, round_.manifests)
        if resolved.needs_manifests:
            self._send_manifest(round_)
        if resolved.plan is None:
            return
        if resolved.differ:
            self._notices.replicas_differ(round_.version, group, resolved.differ)
        if set(round_.manifests) == set(range(len(group.nodes))):
            self._rooms = rooms_for(resolved.plan, round_.manifests, group)
        self._begin_exchange(round_, resolved.plan)

    def _begin_exchange(self, round_: ProtectionRound, plan: RedundancyPlan) -> None:
        group = self.group
        assert group is not None
        assert round_.shards is not None
        round_.exchange = exchange = self._tools.exchange(
            round_.shards,
            plan,
            group,
            attempt=round_.attempt,
            tools=self._tools,
            stored=partial(self._stored_here, round_),
            failed=partial(self._failed, round_),
        )
        round_.protected_in = group.generation
        exchange.begin(self._rooms)
        for position, window in round_.windows.items():
            exchange.let(position, *window)

    # --- results -----------------------------------------------------------------------------

    def _stored_here(self, round_: ProtectionRound) -> None:
        group, exchange = self.group, round_.exchange
        if group is not None and exchange is not None and exchange.fill is not None:
            self.last_bytes = exchange.fill.num_bytes
            self._send_to_all(t.RoundStored(*self._name(round_)))
            self._stored(round_, group.position)

    def _stored(self, round_: ProtectionRound, position: int) -> None:
        group = self.group
        round_.stored.add(position)
        if group is not None and len(round_.stored) == len(group.nodes) and not round_.is_ready:
            self._ready(round_)

    def _ready(self, round_: ProtectionRound, problem: str = "") -> None:
        group = self.group
        assert group is not None
        round_.is_ready = round_.was_ready = True
        self.last_s = clock.now_s() - round_.started_s
        round_.problem = problem
        if not problem:
            self._notices.protected()
        crash_point("smp.protect.ready")
        at = round_.version
        if at == self._committed:
            self.committed(at)
            return
        self._report_ready(round_)

    def _report_ready(self, round_: ProtectionRound) -> None:
        at, problem = round_.version, round_.problem
        survives = self.group.parity if self.group is not None and not problem else 0
        self._send_to_agent(smp_messages.VersionReady(at.generation, at.step, survives, problem))

    def _unable(self, round_: ProtectionRound, reason: str) -> None:
        if self._rounds.is_current(round_) and not round_.is_ready:
            self._send_to_all(t.RoundFailed(*self._name(round_), reason))
            self._give_up(round_, reason)

    def _give_up(self, round_: ProtectionRound, reason: str) -> None:
        round_.stop()
        round_.problem = reason
        if round_.is_sealed and not round_.is_ready:
            self._notices.unprotected(round_.version, reason)
            self._ready(round_, reason)

    def _failed(self, round_: ProtectionRound, reason: str, *, is_corrupt: bool) -> None:
        """Handle a failure of this node; a version with a corrupt slot must not be committed."""
        is_current = self._rounds.is_current(round_)
        if not (is_current and is_corrupt and self._corrupt(round_.version, reason)):
            self._unable(round_, reason)

    # --- messages of the group ---------------------------------------------------------------

    def received(self, session: int, node_id: str, body: t.RoundMessage) -> None:
        group = self.group
        if group is None or session != group.number or self._plan is None or self._is_still:
            return
        position = group.position_of(node_id)
        at = version(body.generation, body.step)
        over = self._rounds.over
        if position is None or (over is not None and at <= over):
            return
        round_ = self._rounds.of(at)
        if body.attempt > round_.attempt:
            self._restart(round_, body.attempt)
        elif body.attempt < round_.attempt and not isinstance(body, t.ManifestData):
            return
        match body:
            case t.RoundSealed():
                round_.reported[position] = (body.plan_id, body.replicas)
                round_.parts[position] = body.part
                round_.shares[position] = body.shares
                self._advance(round_)
            case t.RoundOpened():
                round_.windows[position] = (body.plan_id, body.below)
                if round_.exchange is not None:
                    round_.exchange.let(position, body.plan_id, body.below)
            case t.RoundStored():
                self._stored(round_, position)
            case t.RoundFailed():
                self._give_up(round_, f"node {node_id}: {body.reason}")
            case _:
                pass

    def manifest_came(
        self, session: int, node_id: str, body: t.ManifestData, manifest: NodeManifest
    ) -> None:
        group = self.group
        if group is None or session != group.number:
            return
        self.received(session, node_id, body)
        position = group.position_of(node_id)
        round_ = self._rounds.find(version(body.generation, body.step))
        if round_ is not None and position is not None:
            round_.manifests[position] = manifest
            self._advance(round_)

    def damaged(self, session: int, node_id: str, body: t.RoundMessage, reason: str) -> None:
        """Start a new attempt after damaged data, at most `MAX_ATTEMPTS` times."""
        group = self.group
        round_ = self._rounds.find(version(body.generation, body.step))
        if group is None or round_ is None or session != group.number or round_.is_ready:
            return
        if body.attempt == round_.attempt:
            self._notices.damaged(reason, node_id)
            if round_.attempt < MAX_ATTEMPTS:
                self._restart(round_, round_.attempt + 1)
            else:
                self._unable(round_, reason)

    def lost(self, node_id: str, reason: str) -> None:
        if self.group is not None:
            self._notices.lost(node_id, reason)

    def linked(self, node_id: str) -> None:
        for round_ in self._rounds:
            self._report_again(round_)

    def fill_of(self, session: int, body: t.RoundMessage) -> tuple[ParityWriter, LocalGroup] | None:
        """Return the writer for the blocks and mirrors of a version; callable in any thread."""
        group = self.group
        round_ = self._rounds.find(version(body.generation, body.step))
        if group is None or round_ is None or session != group.number:
            return None
        fill = round_.exchange.fill if round_.exchange is not None else None
        return (fill, group) if fill is not None and round_.attempt == body.attempt else None

    def _poll(self) -> None:
        """Report the nodes that delay a version: all sealed it, and nothing has arrived."""
        group = self.group
        for round_ in self._rounds:
            if group is None or round_.is_ready or len(round_.reported) < len(group.nodes):
                continue
            if not round_.has_moved():
                self._notices.stalled(round_.version, group, round_.stored)

    def _check_links(self) -> None:
        group = self.group
        if group is None:
            return
        links = [
            (position.node_id, self._peers.find(position.node_id, PROTECT))
            for position in group.others
        ]
        found = [node_id for node_id, link in links if link is not None and link.carries_nothing]
        self._set_unreachable(found)

    def _set_unreachable(self, nodes: list[str]) -> None:
        if nodes != self._unreachable:
            self._unreachable = nodes
            self._send_to_agent(smp_messages.PeersUnreachable(nodes))

    # --- details -----------------------------------------------------------------------------

    def _restart(self, round_: ProtectionRound, attempt: int) -> None:
        round_.restart(attempt)
        if round_.manifest is not None:
            self._report_sealed(round_)
            self._advance(round_)

    def _report_again(self, round_: ProtectionRound) -> None:
        """Repeat what a lost connection may have dropped. Others may miss it though all is here."""
        group = self.group
        if not round_.is_ready:
            self._restart(round_, round_.attempt + 1)
        elif round_.problem:
            self._send_to_all(t.RoundFailed(*self._name(round_), round_.problem))
        elif group is not None and group.is_possible and round_.manifest is not None:
            self._report_sealed(round_)
            if group.position in round_.stored:
                self._send_to_all(t.RoundStored(*self._name(round_)))

    def _name(self, round_: ProtectionRound) -> tuple[int, int, int]:
        return round_.version.generation, round_.version.step, round_.attempt

    def _send_to_all(self, body: t.AnyTransfer, raw: bytes = b"") -> None:
        group = self.group
        assert group is not None
        digest = digest_of([raw]) if raw else None
        for position in group.others:
            self._peers.link(position, PROTECT).send(
                OutgoingFrame(body, [raw] if raw else (), digest)
            )
