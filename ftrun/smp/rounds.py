"""One version on its way to be protected: what is known of it so far.

Runs in:  the SMP, in the server's thread.
Takes in: what `Protector` hears of a version.
Gives:    a `Round`.
"""

from dataclasses import dataclass, field

from ftrun.ids import Version
from ftrun.smp.exchange import Exchange
from ftrun.smp.shards import HeldShards
from ftrun.snapshot.group_plan import Told
from ftrun.snapshot.manifest import NodeManifest


@dataclass
class Round:
    """One version; begun anew, with the next attempt, where a link was lost on the way.

    What is kept by place is what that node of the group has said.
    """

    version: Version
    attempt: int = 1
    is_sealed: bool = False
    """By all local ranks."""
    shards: HeldShards | None = None
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
