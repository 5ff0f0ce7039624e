"""A small model of the SMP: what it promises, without the bytes.

It keeps exactly what the real one does (see `ftrun/wire/messages.py`): two slots for the ranks
of its node, of which the committed one is never overwritten; two parts in protections, of which
the one that is relied on is never overwritten; nothing new is taken before the restored version
is protected and committed again in the generation that runs.
"""

from typing import TYPE_CHECKING

from ftrun.ids import Version, version
from ftrun.wire.plan import Plan, Source
from ftrun.wire.protected import GroupMember
from simulation.memory import Arena, Memory, Part, Slot

if TYPE_CHECKING:
    from simulation.node import Node
    from simulation.world import World

RETRY_S = 0.5
FETCH_FOR_S = 4.0


class Smp:
    """One SMP process. Its memory is the node's."""

    def __init__(self, node: "Node", port: int) -> None:
        self.node = node
        self.port = port
        self.is_alive = True
        self.plan: Plan | None = None
        self.arena: Arena = (0, ())
        self.ports: dict[str, int] = {}
        self.committed: Version | None = None
        """The newest commit in this generation, as the command page shows it."""
        self.ready: Version | None = None
        self.abandoned_step = -1
        """By the lead's word, which follows its word of the commits before it."""
        self.skipped_step = -1
        """By this node's own."""
        self.problem = ""
        self.has_restored = False
        self.is_still = False
        """It has told what it holds, and keeps that until the next generation begins."""
        self.capturing: Version | None = None
        """Begun, and neither committed nor abandoned."""
        self._protecting: Version | None = None
        self._acks: set[str] = set()
        self._begun = 0
        """Counts what was begun anew: work of before is dropped."""
        self._random = node.random

    @property
    def memory(self) -> Memory:
        return self.node.memory

    @property
    def world(self) -> "World":
        return self.node.world

    @property
    def generation(self) -> int:
        return self.plan.generation if self.plan is not None else -1

    @property
    def restored(self) -> Version | None:
        """What this generation has started from."""
        return self.node.restored_in.get(self.generation)

    # --- a generation ---------------------------------------------------------------------------

    def begin_generation(self, plan: Plan) -> None:
        """Who takes part from now on; again after it, or another SMP, was started anew."""
        is_again = self.plan is not None and self.plan.generation == plan.generation
        self.plan = plan
        self.is_still = self.is_still and is_again
        self._begun += 1
        self._acks.clear()
        self._protecting = None
        self.ports = dict(plan.smp_ports)
        if is_again:
            self._protect_again()
            return
        node = plan.member(self.node.node_id)
        self.arena = (plan.world_size, tuple(node.ranks) if node is not None else ())
        self.committed = self.ready = self.capturing = None
        self.abandoned_step = self.skipped_step = -1
        self.problem = ""
        self.has_restored = False
        if node is None:
            return
        restored = self.restored
        if restored is None:
            self.has_restored = True
        elif all(self.good_slot(restored, rank) for rank in self.arena[1]) and (
            self.memory.slot(restored, self.arena) is not None
        ):
            self._restored(restored)
        else:
            self._fetch(restored, self._begun, self.world.now_s)

    def go_on(self, before: "Smp") -> None:
        """Take over from an SMP that has died, in the middle of its generation."""
        self.plan, self.arena, self.ports = before.plan, before.arena, before.ports
        self.committed, self.capturing = before.committed, before.capturing
        self.has_restored, self.problem = before.has_restored, before.problem
        self.is_still = before.is_still
        self.abandoned_step, self.skipped_step = before.abandoned_step, before.skipped_step
        if self.plan is None or not self.arena[1]:
            return
        restored = self.restored
        if restored is not None and not self.has_restored:
            self._fetch(restored, self._begun, self.world.now_s)
        else:
            self._protect_again()

    def move_peers(self, ports: dict[str, int]) -> None:
        if self.plan is not None:
            self.ports = {**self.plan.smp_ports, **ports}
            self._begun += 1
            self._acks.clear()
            if self.has_restored:
                self._protect_again()
            elif self.restored is not None and self.arena[1]:
                self._fetch(self.restored, self._begun, self.world.now_s)

    def _protect_again(self) -> None:
        """Whatever is sealed and not committed; else the newest commit, for peers that lost it."""
        for wanted in (self.capturing, self.committed, self.restored):
            if wanted is not None and self.memory.slot(wanted, self.arena) is not None:
                self._protect(wanted)
                return

    # --- restore --------------------------------------------------------------------------------

    def _fetch(self, wanted: Version, begun: int, since_s: float) -> None:
        delay_s = 0.02 + 0.3 * self._random.random()
        self.node.later(delay_s, self._try_to_fetch, self, wanted, begun, since_s)

    def _try_to_fetch(self, _: "Smp", wanted: Version, begun: int, since_s: float) -> None:
        if not self.is_alive or begun != self._begun or self.plan is None:
            return
        state = self._state_of(wanted, self.plan)
        if state is not None:
            self._put(Slot(wanted, self.arena, state, state))
            self._restored(wanted)
        elif self.world.now_s - since_s < FETCH_FOR_S:
            self.node.later(RETRY_S, self._try_to_fetch, self, wanted, begun, since_s)
        else:
            self.problem = f"{wanted} cannot be fetched"
            self.node.tell(is_urgent=True)

    def _state_of(self, wanted: Version, plan: Plan) -> int | None:
        """The state in the shards of the ranks that are needed here; None if one is not had."""
        world_size = sum(len(ranks) for source in plan.sources for ranks in source.ranks)
        ranks = self.arena[1] if world_size == self.arena[0] else range(world_size)
        states = {self._shard(rank, wanted, plan.sources) for rank in ranks}
        if None in states or not states:
            return None
        # What a rank reads is the digest's business; that all read the same is the run's.
        return max(state for state in states if state is not None)

    def _shard(self, rank: int, wanted: Version, sources: list[Source]) -> int | None:
        for source in sources:
            held = next((i for i, ranks in enumerate(source.ranks) if rank in ranks), None)
            if held is None:
                continue
            peer = self._peer(source.node_ids[held])
            slot = peer.good_slot(wanted, rank) if peer is not None else None
            if slot is not None:
                return slot.state
            rebuilt = self._rebuild(source.node_ids[held], wanted, source)
            if rebuilt is not None:
                return rebuilt
        return None

    def _rebuild(self, owner: str, wanted: Version, source: Source) -> int | None:
        """A lost node's state from the rest of its group."""
        if source.parity < 1:
            return None
        missing, found = 0, []
        for node_id, ranks in zip(source.node_ids, source.ranks, strict=True):
            peer = self._peer(node_id)
            part = peer.good_part(wanted, source) if peer is not None else None
            whole = peer is not None and all(peer.good_slot(wanted, rank) for rank in ranks)
            if part is None or not whole:
                missing += 1
            elif owner in part.given:
                found.append(part.given[owner])
        return found[0] if found and missing <= source.parity else None

    def _peer(self, node_id: str) -> "Smp | None":
        """The SMP of a node, where it is reached at the port that is known."""
        if node_id == self.node.node_id:
            return self
        peer = self.node.neighbour(node_id)
        smp = peer.smp if peer is not None else None
        if smp is None or not smp.is_alive or smp.port != self.ports.get(node_id):
            return None
        network = self.node.network
        mine = self.node.node_id
        both = network.passes(mine, node_id) and network.passes(node_id, mine)
        return smp if both and smp.generation == self.generation else None

    def good_slot(self, wanted: Version, rank: int) -> Slot | None:
        """A slot that is what was sealed; a corrupt one is set aside."""
        for slot in list(self.memory.slots):
            if slot.version == wanted and slot.holds(rank):
                if self.is_good(slot.state, slot.digest):
                    return slot
                self.set_aside(slot)
        return None

    def set_aside(self, slot: Slot) -> None:
        self.memory.slots.remove(slot)
        self.node.removed(slot.version)
        self.world.trace(self.node.node_id, f"sets its slot of {slot.version} aside")

    def good_part(self, wanted: Version, source: Source) -> Part | None:
        part = self.memory.part(wanted, source.generation)
        if part is None or [one.node_id for one in part.members] != source.node_ids:
            return None
        if all(self.is_good(part.given[one], part.digests[one]) for one in sorted(part.given)):
            return part if part.is_complete(self.node.node_id) else None
        self.memory.parts.remove(part)
        self.node.removed(part.version)
        self.world.trace(self.node.node_id, f"sets its part of {wanted} aside")
        return None

    @staticmethod
    def is_good(state: int, digest: int) -> bool:
        """The check of a digest."""
        return state == digest

    def _restored(self, wanted: Version) -> None:
        self.has_restored = True
        self.node.world.trace(self.node.node_id, f"has {wanted}")
        self._protect(wanted)
        self.node.restore_ready()

    # --- captures -------------------------------------------------------------------------------

    def may_capture(self) -> bool:
        """Nothing is under way, and what was restored is committed again."""
        if self.capturing is not None or not self.has_restored:
            return False
        return self.restored is None or self.committed is not None

    def begin_capture(self, taken: Version) -> None:
        """Ranks begin to overwrite the older slot."""
        self.capturing = taken
        mine = [slot for slot in self.memory.slots if slot.arena == self.arena]
        if len(mine) >= 2:
            old = self.slot_to_overwrite(mine)
            self.memory.slots.remove(old)
            self.node.removed(old.version)

    def slot_to_overwrite(self, mine: list[Slot]) -> Slot:
        """The older one; never the committed one."""
        free = [slot for slot in mine if slot.version != self.newest_committed()]
        return min(free, key=lambda slot: slot.version)

    def newest_committed(self) -> Version | None:
        return self.committed if self.committed is not None else self.restored

    def sealed(self, taken: Version, state: int) -> None:
        """All ranks of this node have sealed it."""
        if self.capturing != taken:
            return
        self._put(Slot(taken, self.arena, state, state))
        if self.is_alive:
            self._protect(taken)

    def skipped(self, step: int) -> None:
        """A rank here took no snapshot of this step and never will."""
        self.skipped_step = max(self.skipped_step, step)
        self.node.tell(is_urgent=True)

    def _put(self, slot: Slot) -> None:
        self.memory.slots.append(slot)

    # --- protection -----------------------------------------------------------------------------

    @property
    def _group(self) -> list[str]:
        groups = self.plan.groups if self.plan is not None else []
        return next((group for group in groups if self.node.node_id in group), [])

    @property
    def survives(self) -> int:
        """So many nodes of the group may go without loss of what is ready."""
        parity = self.plan.parity if self.plan is not None else 0
        return parity if len(self._group) > parity else 0

    def _protect(self, wanted: Version) -> None:
        self._protecting = wanted
        self._acks.clear()
        group = self._group
        if not group:
            if self.plan is not None and len(self.plan.members) == 1:
                self.commit(wanted)
                self._is_ready(wanted)
            return
        assert self.plan is not None
        if len(group) <= self.plan.parity or self.plan.parity < 1:
            self._is_ready(wanted)
            return
        self._give(self, wanted, self._begun)

    def _give(self, _: "Smp", wanted: Version, begun: int) -> None:
        """Send what others are to keep, until they have it."""
        if not self.is_alive or begun != self._begun or self._protecting != wanted:
            return
        if self.is_still:
            return
        slot = self.memory.slot(wanted, self.arena)
        if slot is None:
            return
        if not self.is_good(slot.state, slot.digest):
            self.set_aside(slot)
            self.problem = f"{wanted} does not match its digest"
            self.node.tell(is_urgent=True)
            return
        waiting = [one for one in self._group if one != self.node.node_id and one not in self._acks]
        for node_id in waiting:
            delay_s = 0.01 + self.node.simulation.scenario.transfer_s * self._random.random()
            self.node.later(delay_s, self._arrives, self, node_id, slot, begun)
        if waiting:
            self.node.later(RETRY_S, self._give, self, wanted, begun)

    def _arrives(self, _: "Smp", node_id: str, slot: Slot, begun: int) -> None:
        peer = self._peer(node_id)
        if peer is None or begun != self._begun or not self.is_alive:
            return
        if peer.keep(self.node.node_id, slot) and slot.version == self._protecting:
            self._acks.add(node_id)
            if len(self._acks) == len(self._group) - 1:
                self._is_ready(slot.version)

    def keep(self, giver: str, slot: Slot) -> bool:
        """Keep a mirror of this, and count it into the parity; False while there is no room."""
        assert self.plan is not None
        if self.is_still or giver not in self._group:
            return False
        if not self.is_good(slot.state, slot.digest):
            return False
        part = self.memory.part(slot.version, self.plan.generation)
        if part is None:
            if not self._make_room():
                return False
            members = [
                GroupMember(node_id, list(node.ranks))
                for node_id in self._group
                if (node := self.plan.member(node_id)) is not None
            ]
            part = Part(
                slot.version, slot.arena[0], self.plan.generation, members, self.plan.parity
            )
            self.memory.parts.append(part)
        if giver not in part.given:
            part.given[giver] = slot.state
            part.digests[giver] = slot.digest
        return True

    def _make_room(self) -> bool:
        if len(self.memory.parts) < 2:
            return True
        relied = self._relied_on()
        free = [part for part in self.memory.parts if not any(part is one for one in relied)]
        free = [part for part in free if not self._is_wanted(part)]
        if not free:
            # What is relied on and what is committed: a third one is filled until the commit.
            return len(self.memory.parts) == len(relied) == 2
        old = min(free, key=lambda part: part.key)
        self.memory.parts.remove(old)
        self.node.removed(old.version)
        return True

    def _relied_on(self) -> list[Part]:
        """Those without which the newest committed version could be lost."""
        assert self.plan is not None
        committed = [part for part in self.memory.parts if part.is_committed]
        newest = max(committed, key=lambda part: part.key, default=None)
        named = self._named()
        if named is not None and named.is_committed:
            return [named]
        return [part for part in (named, newest) if part is not None]

    def _named(self) -> Part | None:
        """The protection of the version that this generation has started from."""
        assert self.plan is not None
        restored = self.restored
        if self.committed is None and restored is not None:
            relied = self.plan.protected_in(self.node.node_id)
            if relied >= 0:
                return self.memory.part(restored, relied)
        return None

    def _is_wanted(self, part: Part) -> bool:
        """It is being protected in this generation, and neither committed nor abandoned."""
        if part.protected_in != self.generation or part.is_committed:
            return False
        return part.version.step > self.abandoned_step or part.version == self.restored

    def _is_ready(self, wanted: Version) -> None:
        self.ready = wanted
        self.node.tell(is_urgent=True)

    # --- the lead's word ------------------------------------------------------------------------

    def commit(self, wanted: Version) -> None:
        """Every node holds and protects it: it may be relied on."""
        if self.committed is not None and wanted <= self.committed:
            is_held = self.memory.slot(wanted, self.arena) is not None
            if is_held and wanted == self.committed:
                # It has committed that by itself where it is alone, before the plan took effect.
                self.node.has_committed(wanted)
            return
        self.committed = wanted
        if self.capturing is not None and self.capturing <= wanted:
            self.capturing = None
        part = self.memory.part(wanted, self.generation)
        if part is not None:
            part.is_committed = True
            if len(self.memory.parts) > 2:
                others = [one for one in self.memory.parts if one is not part]
                self.memory.parts.remove(others[0])
                self.node.removed(others[0].version)
        if wanted.generation == self.generation:
            # The first commit of this layout: nobody needs another one any more.
            for slot in [one for one in self.memory.slots if one.arena != self.arena]:
                self.memory.slots.remove(slot)
                self.node.removed(slot.version)
        self.node.has_committed(wanted)

    def abandon(self, step: int) -> None:
        """Uncommitted versions of this generation up to this step are over."""
        self.abandoned_step = max(self.abandoned_step, step)
        if self.capturing is not None and self.capturing.step <= step:
            self.capturing = None
            self._protecting = None


def as_version(pair: tuple[int, int] | None) -> Version | None:
    return version(*pair) if pair is not None else None
