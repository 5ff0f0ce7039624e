"""The control loop of a node in a run on several nodes; it decides in the cluster thread.

Runs in:  agent: `tell` and `close` in any thread, the rest in the cluster thread.
Takes in: events.
Gives:    commands for the executor; ranks suspended and resumed at once.
"""

from ftrun.agent.cluster.connections import ClusterConnections
from ftrun.agent.cluster.control_loop import ControlLoop, NetworkCommand
from ftrun.agent.cluster.witness_thread import WitnessClient
from ftrun.membership.events import Happening
from ftrun.recovery.commands import Command, ResumeRanks, SuspendRanks


class ClusterControlLoop(ControlLoop):
    """A control loop in a thread of its own; `tell` hands the main thread's events over to it."""

    thread: ClusterConnections | None = None
    witness_thread: WitnessClient | None = None

    def tell(self, event: Happening) -> None:
        assert self.thread is not None
        self.thread.tell(event)

    def passing(self) -> None:
        """Raise the failure of a thread; the control loop here has its own clock.

        Raises:
            RuntimeError: the cluster thread or the witness thread has ended because of a bug. The
                agent ends with 70, and the stub starts another one.
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
        # Ranks are suspended here, before another agent can have replaced them. The main thread may
        # be busy at that time.
        if isinstance(command, SuspendRanks | ResumeRanks) and self.thread is not None:
            self.thread.hold_now(isinstance(command, SuspendRanks))
        super()._sort(command, network)
