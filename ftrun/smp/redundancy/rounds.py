"""The versions that are being protected, and the state of each.

Runs in:  the SMP, in the server thread.
Takes in: messages about a version that `Protector` receives.
Gives:    a `ProtectionRound` for each version; the newest finished version.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ftrun.ids import Version
from ftrun.smp.memory.sealed_shards import SealedShards
from ftrun.smp.redundancy.exchange import Exchange
from ftrun.snapshot.manifest import NodeManifest
from ftrun.snapshot.plan_agreement import ReplicaReport
from ftrun.wire.messages.smp import NodeAddress

MAX_ROUNDS = 4
"""Limit of versions that other nodes have sealed but this node has not."""


@dataclass
class ProtectionRound:
    """One version; a lost link begins another attempt. Keys of dicts are group positions."""

    version: Version
    attempt: int = 1
    is_sealed: bool = False
    """All local ranks have sealed this version."""
    shards: SealedShards | None = None
    manifest: NodeManifest | None = None
    manifest_is_sent: bool = False
    reported: dict[int, ReplicaReport] = field(default_factory=dict)
    parts: dict[int, int] = field(default_factory=dict)
    manifests: dict[int, NodeManifest] = field(default_factory=dict)
    own_shares: int = 0
    """Identifies the shares of this node; see `ReplicaMonitor.statement`."""
    shares: dict[int, int] = field(default_factory=dict)
    """Likewise for each node of the group. A new attempt does not change them."""
    windows: dict[int, tuple[int, int]] = field(default_factory=dict)
    stored: set[int] = field(default_factory=set)
    exchange: Exchange | None = None
    protected_in: int = -1
    is_ready: bool = False
    was_ready: bool = False
    """The agent received VersionReady, which cannot be revoked."""
    problem: str = ""
    started_s: float = 0.0
    seen: tuple[object, ...] = ()
    """The progress at the last call of `has_moved`."""

    def restart(self, attempt: int) -> None:
        """Start a new attempt: drop the exchange, and all content except manifests and shares."""
        self.stop()
        self.attempt = attempt
        self.reported, self.parts, self.windows, self.stored = {}, {}, {}, set()
        self.manifest_is_sent = self.is_ready = False
        self.problem = ""

    def has_moved(self) -> bool:
        """True if anything has arrived since the last call."""
        missing = self.exchange.missing if self.exchange is not None else None
        before = self.seen
        self.seen = (self.attempt, len(self.manifests), len(self.stored), missing)
        return before != self.seen

    def stop(self) -> None:
        """End the exchange; after the return, it neither receives nor sends bytes."""
        if self.exchange is not None:
            self.exchange.stop()
        self.exchange = None

    def status(self, nodes: Sequence[NodeAddress]) -> dict[str, object]:
        return {
            "generation": self.version.generation,
            "step": self.version.step,
            "attempt": self.attempt,
            "stored_by": [nodes[position].node_id for position in sorted(self.stored)],
            "missing": self.exchange.missing if self.exchange is not None else None,
            "ready": self.is_ready,
            "problem": self.problem,
        }


class ProtectionRounds:
    """The rounds of one generation, by version."""

    def __init__(self) -> None:
        self.over: Version | None = None
        """The newest finished version. Messages about it and older ones are ignored."""
        self._rounds: dict[Version, ProtectionRound] = {}

    def __iter__(self) -> Iterator[ProtectionRound]:
        return iter(list(self._rounds.values()))

    def find(self, wanted: Version) -> ProtectionRound | None:
        return self._rounds.get(wanted)

    def of(self, wanted: Version) -> ProtectionRound:
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
        """Drop the chosen rounds. If they are over, later messages about them are ignored."""
        for at in [one for one in self._rounds if chosen(one)]:
            self._rounds.pop(at).stop()
            if is_over:
                self.over = at if self.over is None else max(self.over, at)

    def stop(self) -> None:
        for round_ in self:
            round_.stop()
        self._rounds.clear()
