"""The versions on their way to be protected: what is known of each so far.

Runs in:  the SMP, in the server's thread.
Takes in: what `Protector` hears of a version.
Gives:    a `ProtectionRound` for each; those that are over.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ftrun.ids import Version
from ftrun.smp.memory.sealed_shards import SealedShards
from ftrun.smp.redundancy.exchange import Exchange
from ftrun.snapshot.manifest import NodeManifest
from ftrun.snapshot.plan_agreement import Told
from ftrun.wire.messages.protected import NodeAddress

MAX_ROUNDS = 4
"""Versions that others have sealed and this node has not, besides the one under way."""


@dataclass
class ProtectionRound:
    """One version; begun anew, with the next attempt, where a link was lost on the way.

    What is kept by place is what that node of the group has said.
    """

    version: Version
    attempt: int = 1
    is_sealed: bool = False
    """By all local ranks."""
    shards: SealedShards | None = None
    manifest: NodeManifest | None = None
    manifest_is_sent: bool = False
    told: dict[int, Told] = field(default_factory=dict)
    parts: dict[int, int] = field(default_factory=dict)
    manifests: dict[int, NodeManifest] = field(default_factory=dict)
    windows: dict[int, tuple[int, int]] = field(default_factory=dict)
    stored: set[int] = field(default_factory=set)
    exchange: Exchange | None = None
    protected_in: int = -1
    is_ready: bool = False
    was_ready: bool = False
    """The agent has been told so; that cannot be taken back."""
    problem: str = ""
    began_s: float = 0.0
    seen: tuple[object, ...] = ()
    """How far it was when it was last looked at."""

    def begin_again(self, attempt: int) -> None:
        """Forget all but what the version is."""
        self.stop()
        self.attempt = attempt
        self.told, self.parts, self.windows, self.stored = {}, {}, {}, set()
        self.manifest_is_sent = self.is_ready = False
        self.problem = ""

    def has_moved(self) -> bool:
        """Whether anything has come since this was last asked."""
        missing = self.exchange.missing if self.exchange is not None else None
        before, self.seen = (
            self.seen,
            (self.attempt, len(self.manifests), len(self.stored), missing),
        )
        return before != self.seen

    def stop(self) -> None:
        """No byte of it comes in or goes out any more when this returns."""
        if self.exchange is not None:
            self.exchange.stop()
        self.exchange = None

    def status(self, nodes: Sequence[NodeAddress]) -> dict[str, object]:
        """For the status document; nodes of the group in its order."""
        return {
            "generation": self.version.generation,
            "step": self.version.step,
            "attempt": self.attempt,
            "stored_by": [nodes[place].node_id for place in sorted(self.stored)],
            "missing": self.exchange.missing if self.exchange is not None else None,
            "ready": self.is_ready,
            "problem": self.problem,
        }


class ProtectionRounds:
    """Those of one generation, by version."""

    def __init__(self) -> None:
        self.over: Version | None = None
        """The newest that is settled: nothing more is heard of it or of those before."""
        self._rounds: dict[Version, ProtectionRound] = {}

    def __iter__(self) -> Iterator[ProtectionRound]:
        return iter(list(self._rounds.values()))

    def find(self, wanted: Version) -> ProtectionRound | None:
        return self._rounds.get(wanted)

    def of(self, wanted: Version) -> ProtectionRound:
        """That of a version, begun if need be."""
        if wanted not in self._rounds:
            self._rounds[wanted] = ProtectionRound(wanted)
            others = [at for at, one in self._rounds.items() if not one.is_sealed]
            for extra in sorted(others)[: max(0, len(others) - MAX_ROUNDS)]:
                if extra != wanted:
                    self._rounds.pop(extra).stop()
        return self._rounds[wanted]

    def is_current(self, round_: ProtectionRound) -> bool:
        return self._rounds.get(round_.version) is round_

    def drop(self, chosen: Callable[[Version], bool], *, is_over: bool = True) -> None:
        """Give these up; nothing more is to be heard of them where they are over."""
        for at in [one for one in self._rounds if chosen(one)]:
            self._rounds.pop(at).stop()
            if is_over:
                self.over = at if self.over is None else max(self.over, at)

    def stop(self) -> None:
        """Give up all of them."""
        for round_ in self:
            round_.stop()
        self._rounds.clear()
