"""An agent's view of its SMP: handles the messages of `ftrun/agent/snapshots/smp_client.py`."""

from typing import Any

from ftrun.ids import Version, version
from ftrun.wire.messages import smp as smp_messages


class SmpLink:
    """The SMP client of one agent."""

    def __init__(self) -> None:
        self.generation = -1
        self.ready: Version | None = None
        self.survives = 0
        self.unprotected = ""
        self.abandoned_step = -1
        self.is_restored = False
        self.restore_failed = ""
        self.lost_links = False
        self.committed: Version | None = None
        self.unreachable: tuple[str, ...] = ()

    def begin(self, generation: int) -> None:
        self.generation = generation
        self.ready, self.abandoned_step, self.restore_failed = None, -1, ""
        self.is_restored = self.lost_links = False

    def take(self, body: Any) -> None:
        match body:
            case smp_messages.VersionCommitted():
                self.committed = version(body.generation, body.step)
            case smp_messages.VersionReady():
                self.ready = version(body.generation, body.step)
                self.survives, self.unprotected = body.survives, body.reason
            case smp_messages.AbandonVersion():
                self.abandoned_step = max(self.abandoned_step, body.step)
            case smp_messages.RestoreReady():
                self.is_restored = True
            case smp_messages.RestoreFailed():
                self.restore_failed, self.lost_links = body.reason, body.is_link
            case smp_messages.PeersUnreachable():
                self.unreachable = tuple(body.nodes)
            case _:
                pass
