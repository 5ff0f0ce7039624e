"""What the status and the observers read of a run.

Runs in:  agent.
"""

from typing import Protocol

from ftrun.agent.cluster.control_loop import ControlLoop
from ftrun.agent.cluster.rpc import ClusterRpc
from ftrun.agent.launch.generation import GenerationRunner
from ftrun.agent.launch.warm_start import ZygoteClient
from ftrun.agent.launch.worker_group import WorkerGroup
from ftrun.agent.maintenance import Maintenance
from ftrun.agent.observe.ranks import RankObserver
from ftrun.agent.snapshots.smp_client import AgentSmpClient
from ftrun.config.run_spec import RunSpec
from ftrun.journal import Journal


class MetricsAddress(Protocol):
    """Address at which metrics are served."""

    @property
    def metrics_address(self) -> str | None: ...


class RunView(Protocol):
    """The parts of one run on one node; for reading only."""

    @property
    def spec(self) -> RunSpec: ...
    @property
    def journal(self) -> Journal: ...
    @property
    def smp(self) -> AgentSmpClient: ...
    @property
    def zygote(self) -> ZygoteClient | None: ...
    @property
    def workers(self) -> WorkerGroup: ...
    @property
    def generations(self) -> GenerationRunner: ...
    @property
    def brain(self) -> ControlLoop: ...
    @property
    def caretaker(self) -> Maintenance: ...
    @property
    def desk(self) -> ClusterRpc | None: ...
    @property
    def eyes(self) -> RankObserver: ...
    @property
    def onlookers(self) -> MetricsAddress | None: ...
    @property
    def started_s(self) -> float: ...
    def wake(self) -> None: ...
