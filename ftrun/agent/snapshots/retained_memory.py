"""The memory and state of a node that outlive its SMP and its agent.

Runs in the main thread. Memory and state survive the loss of SMP and agent at the same time,
because the stub holds them too.

SMP and stub retain the state as bytes and do not decode it; the stub has no msgspec. The stub
receives the state in a memfd, as the first descriptor, because the plan of thousands of nodes is
large.
"""

import os
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

import msgspec

from ftrun.errors import LayoutUnknown
from ftrun.ids import Rank, Version
from ftrun.wire.cluster.generation import GenerationPlan
from ftrun.wire.messages.agent_start import AGENT_LOST_S, RETAINED_FDS, STUB_SOCKET, decode_numbers
from ftrun.wire.messages.smp import ShardOffer
from ftrun.wire.shared_memory.arena import SlotState, read_shape, read_slot_headers, void_slots


class RetainedMemory:
    """Descriptors of shared memory; this object owns and closes all of them."""

    def __init__(self) -> None:
        self.arenas: dict[Rank, list[int]] = {}
        """Arenas by rank, the newest layout last."""
        self.parity_regions: dict[int, int] = {}

    @property
    def held(self) -> list[tuple[Rank, int]]:
        """Rank and descriptor of every arena; the oldest layout of each rank first."""
        return [(rank, fd) for rank, fds in sorted(self.arenas.items()) for fd in fds]

    def keep(self, rank: Rank, fd: int) -> None:
        self.arenas.setdefault(rank, []).append(fd)

    def retain_parity_region(self, slot: int, fd: int) -> None:
        self.drop_parity_region(slot)
        self.parity_regions[slot] = fd

    def drop_parity_region(self, slot: int) -> None:
        old = self.parity_regions.pop(slot, None)
        if old is not None:
            os.close(old)

    def adopt(self, fds: list[int]) -> None:
        for fd in fds:
            try:
                self.keep(Rank(read_shape(fd).rank), fd)
            except LayoutUnknown:
                os.close(fd)

    def offers(self) -> list[ShardOffer]:
        """Every sealed slot on this node; read from the arenas, so it needs no SMP."""
        found: list[ShardOffer] = []
        for rank, fd in self.held:
            with suppress(LayoutUnknown):
                shape = read_shape(fd)
                found.extend(
                    ShardOffer(rank, at.generation, at.step, shape.world_size, shape.image_bytes)
                    for at in _sealed(fd)
                )
        return found

    def arena_for(self, rank: Rank, wanted: Version | None) -> int | None:
        fds = self.arenas.get(rank, [])
        newest = fds[-1] if fds else None
        return next((fd for fd in fds if wanted in _sealed(fd)), newest)

    def holds(self, rank: Rank, wanted: Version) -> bool:
        return any(wanted in _sealed(fd) for fd in self.arenas.get(rank, []))

    def whole_versions(self, ranks: Collection[Rank]) -> list[Version]:
        """Versions that all of these ranks have sealed, committed or not, the newest first."""
        sealed = {one for rank in ranks for fd in self.arenas.get(rank, []) for one in _sealed(fd)}
        whole = [one for one in sealed if all(self.holds(rank, one) for rank in ranks)]
        return sorted(whole, reverse=True)

    def void(self, chosen: Callable[[Version], bool]) -> int:
        """Void the chosen versions; return the number of slots. The workers must be dead."""
        return sum(void_slots(fd, chosen) for _, fd in self.held)

    def void_slot(self, rank: Rank, wanted: Version | None) -> None:
        for fd in self.arenas.get(rank, []):
            void_slots(fd, lambda found: found == wanted)

    def drop_other_ranks(self, ranks: Collection[Rank]) -> None:
        for rank in [rank for rank in self.arenas if rank not in ranks]:
            for fd in self.arenas.pop(rank):
                os.close(fd)

    def drop_previous_layouts(self, committed: Version | None) -> None:
        """Close arenas of older layouts: every rank has sealed the committed version."""
        for fds in self.arenas.values():
            while len(fds) > 1 and committed in _sealed(fds[-1]):
                os.close(fds.pop(0))

    def has_more_than(self, committed: Version) -> bool:
        """Whether a rank has several arenas, and one of them lacks the committed version.

        That arena is being filled, or was granted in an earlier generation and is freed by the SMP.
        """
        several = [fds for fds in self.arenas.values() if len(fds) > 1]
        return any(committed not in _sealed(fd) for fds in several for fd in fds)

    def close(self) -> None:
        for fd in (*(fd for _, fd in self.held), *self.parity_regions.values()):
            os.close(fd)
        self.arenas.clear()
        self.parity_regions.clear()


def _sealed(fd: int) -> list[Version]:
    headers = read_slot_headers(fd)
    return [header.version for header in headers if header.state is SlotState.SEALED]


class PersistedAgentState(msgspec.Struct, frozen=True):
    """The newest persisted state of an agent."""

    plan: GenerationPlan | None = None
    is_chosen: bool = False
    """The plan is chosen; False: it was accepted, and may have been chosen."""
    fault: str = ""
    """The hardware fault that an agent of this stub has found, in words; empty: none."""

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


def newer(from_smp: PersistedAgentState, from_stub: PersistedAgentState) -> PersistedAgentState:
    """The newer of both states; one of them may have missed the last update.

    The fault is the stub's. An SMP may outlive its stub: then ftrun was started again on this node,
    and its device may have been repaired.
    """
    plan_of = (from_smp.plan, from_stub.plan)
    ages = [(plan.configuration_id if plan is not None else (-1, 0)) for plan in plan_of]
    is_first = (ages[0], from_smp.is_chosen) >= (ages[1], from_stub.is_chosen)
    found = from_smp if is_first else from_stub
    return msgspec.structs.replace(found, fault=from_stub.fault)


def decode_state(data: bytes) -> PersistedAgentState | None:
    """Decode the state; empty if `data` is empty, None if it is of another version of ftrun."""
    if not data:
        return PersistedAgentState()
    try:
        return msgspec.json.decode(data, type=PersistedAgentState)
    except msgspec.MsgspecError:
        return None


class StubClient:
    """The agent's end of the socket to the stub; has no effect without a stub."""

    def __init__(self) -> None:
        number = os.environ.pop(STUB_SOCKET, "")
        self._socket = socket.socket(fileno=int(number)) if number else None
        if self._socket is not None:
            self._socket.set_inheritable(False)
        self._sent: tuple[tuple[int, ...], PersistedAgentState | None] = ((), None)

    def keep(self, fds: Sequence[int], state: PersistedAgentState) -> None:
        """Make the stub hold duplicates of exactly these descriptors, and this state."""
        now = (tuple(fds), state)
        if self._socket is None or (now[0] == self._sent[0] and state is self._sent[1]):
            return
        with suppress(OSError):  # if the stub has ended, this agent ends too
            fd = os.memfd_create("ftrun-kept-state")
            with open(fd, "wb") as file:
                file.write(state.encode())
                file.flush()
                socket.send_fds(self._socket, [b"\0"], [fd, *fds])
            self._sent = now


def last_agent_ended_s() -> float | None:
    """Monotonic time at which the last agent ended; None: this is the first agent of its stub."""
    return float(os.environ.pop(AGENT_LOST_S, "0")) or None


def kept() -> tuple[list[int], PersistedAgentState | None]:
    """Memory and state (see `decode_state`) of the stub; the caller owns the descriptors."""
    numbers = decode_numbers(os.environ.pop(RETAINED_FDS, ""))
    if not numbers:
        return [], PersistedAgentState()
    first, *fds = numbers
    for fd in fds:
        os.set_inheritable(fd, False)
    with open(first, "rb") as file:  # the writer has left the file position at the end
        file.seek(0)
        return fds, decode_state(file.read())
