"""The brain of a node among others: its decisions are made in the thread that speaks with them.

Runs in:  agent: `tell` and `close` in any thread, the rest in the cluster thread.
Takes in: happenings.
Gives:    orders for the hands; ranks stopped and let go at once.
"""

from ftrun.agent.cluster.connections import ClusterConnections
from ftrun.agent.cluster.control_loop import ControlLoop, NetworkCommand
from ftrun.agent.cluster.witness_thread import WitnessClient
from ftrun.membership.events import Happening
from ftrun.recovery.commands import Command, ResumeRanks, SuspendRanks


class ClusterControlLoop(ControlLoop):
    """A brain in a thread of its own: the hands' events cross over to it."""

    thread: ClusterConnections | None = None
    witness_thread: WitnessClient | None = None

    def tell(self, event: Happening) -> None:
        assert self.thread is not None
        self.thread.tell(event)

    def passing(self) -> None:
        """It has a clock of its own.

        Raises:
            RuntimeError: its thread, or that of the witness, has ended in a bug. The agent ends
                with 70, and the stub starts another one.
        """
        if self.thread is not None and self.thread.failure is not None:
            raise RuntimeError("the cluster thread has ended") from self.thread.failure
        if self.witness_thread is not None and self.witness_thread.failure is not None:
            raise RuntimeError("the witness thread has ended") from self.witness_thread.failure

    def close(self) -> None:
        if self.thread is not None:
            self.thread.close()
        if self.witness_thread is not None:
            self.witness_thread.close()

    def _sort(self, command: Command, network: list[NetworkCommand]) -> None:
        # Ranks are stopped before anybody could have replaced them, whatever the hands do now.
        if isinstance(command, SuspendRanks | ResumeRanks) and self.thread is not None:
            self.thread.hold_now(isinstance(command, SuspendRanks))
        super()._sort(command, network)
