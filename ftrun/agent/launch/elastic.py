"""torchrun's own launcher, with three parts replaced by ftrun's.

Runs in the main thread. Everything but agent class, worker starter and rendezvous stays torch's, in
the installed version: flags, log folders, error files, macros, environment contract.

Source:   the names used here exist from torch 2.6 to 2.15; see docs/internals.md.
"""

import logging
import os
import signal
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server import api as agent_api
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api
from torch.distributed.launcher import api as launcher_api

from ftrun.agent.launch.rendezvous import BACKEND, PlanRendezvousHandler
from ftrun.agent.launch.warm_start import FULL, WorkerStarter
from ftrun.config.run_spec import RunSpec
from ftrun.errors import UsageError
from ftrun.wire.cluster.generation import GenerationPlan

_log = logging.getLogger(__name__)

UNUSED_SIGNAL = signal.SIGWINCH
"""The only signal for which torch installs its handler, because this handler raises an exception in
the middle of any code. ftrun queues signals instead. `RunSignals.catch` resets this signal to its
default action, which ignores it."""


class FtrunElasticAgent(local_elastic_agent.LocalElasticAgent):
    """LocalElasticAgent with ftrun's loop; `drive` is set before torch creates an instance."""

    drive: Callable[["FtrunElasticAgent"], None]

    def _invoke_run(self, role: str = "default") -> agent_api.RunResult:
        type(self).drive(self)
        ranks = [worker.global_rank for worker in self._worker_group.workers]
        return agent_api.RunResult(
            state=agent_api.WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks)
        )

    def place_in(self, plan: GenerationPlan, node_id: str) -> None:
        PlanRendezvousHandler.plan = plan
        PlanRendezvousHandler.group_rank = [one.node_id for one in plan.members].index(node_id)

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: agent_api.WorkerSpec
    ) -> list[agent_api.Worker]:
        """Assign ranks as in the plan. Torch's own method would wait for every other agent."""
        plan = PlanRendezvousHandler.plan
        first, size = plan.members[group_rank].first_rank, plan.world_size
        return [
            agent_api.Worker(
                local_rank=local_rank,
                global_rank=first + local_rank,
                role_rank=first + local_rank,
                world_size=size,
                role_world_size=size,
            )
            for local_rank in range(spec.local_world_size)
        ]

    def start_generation(self, generation: int) -> None:
        # Torch names log folders and sets TORCHELASTIC_RESTART_COUNT by this difference.
        self._remaining_restarts = self._worker_group.spec.max_restarts - generation
        self._store = self._worker_group.store = None  # closes it, so that a given port is free
        try:
            self._initialize_workers(self._worker_group)
        except OSError as error:
            if error.errno not in FULL:
                raise
            # No rank runs yet: the files of ranks are opened by `WorkerStarter`.
            _log.warning("no log files from generation %d on: %s", generation, error)
            self._store = self._worker_group.store = None
            for name in ("duplicate_stdout_filters", "duplicate_stderr_filters"):  # torch 2.10
                if hasattr(self._worker_group.spec, name):
                    setattr(self._worker_group.spec, name, None)
            self._logs_specs = multiprocessing_api.DefaultLogsSpecs(log_dir=os.devnull)
            self._initialize_workers(self._worker_group)

    def close_generation(self) -> None:
        """Make torch close what it opened for dead workers: log tails, files and timers."""
        if (timers := self._worker_watchdog) is not None:
            timers.stop()
            self._worker_watchdog = None
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGKILL)
            self._pcontext = None

    @property
    def error_files(self) -> dict[int, str]:
        return self._pcontext.error_files if self._pcontext is not None else {}

    @property
    def worker_group(self) -> agent_api.WorkerGroup:
        return self._worker_group


def parse(spec: RunSpec) -> Namespace:
    parser = torchrun.get_args_parser()
    if "PET_MASTER_PORT" not in os.environ:
        # Before 2.13 torch has a default here, and two runs on one node would share this port.
        parser.set_defaults(master_port=None)
    args: Namespace = parser.parse_args(spec.torchrun_argv)
    if args.rdzv_id == "none":
        args.rdzv_id = spec.run_id
    if args.log_dir is None:
        # Torch would create a folder under /tmp for its error files, and leave it there.
        args.log_dir = f"{spec.log_folder}/workers"
    args.standalone = False
    args.rdzv_backend = BACKEND
    args.rdzv_endpoint = "127.0.0.1:0"  # unused, but torch warns if it is empty
    args.node_rank = 0  # taken from the plan; torch would warn that it is ignored
    args.run_path = False  # the warm start replaces --run-path
    if hasattr(args, "signals_to_handle"):
        args.signals_to_handle = UNUSED_SIGNAL.name
    return args


def local_world_size(args: Namespace) -> int:
    with _flags_refused(f"--nproc-per-node {args.nproc_per_node}"):
        count = int(torchrun.determine_local_world_size(args.nproc_per_node))
    if count < 1:
        raise UsageError(f"--nproc-per-node is 1 or more, auto, cpu, gpu or xpu, not {count}")
    return count


def launch_config(args: Namespace) -> tuple[Any, ...]:
    """Convert the flags with torch, which checks all of them; creates the log folder."""
    for flag, value in (("redirects", args.redirects), ("tee", args.tee)):
        with _flags_refused(f"--{flag} {value}"):
            multiprocessing_api.Std.from_str(value)
    with _flags_refused("a flag of torchrun"):
        return torchrun.config_from_args(args)


@contextmanager
def _flags_refused(what: str) -> Iterator[None]:
    """Convert the errors that torch raises for a wrong value; nothing else can fail here yet."""
    try:
        yield
    except (ValueError, AssertionError, RuntimeError, LookupError, ImportError, OSError) as error:
        reason = str(error) or type(error).__name__
        raise UsageError(f"{what} cannot be used here: {reason}") from error


def run(
    args: Namespace, config: tuple[Any, ...], starter: WorkerStarter, drive: Callable[[Any], None]
) -> None:
    FtrunElasticAgent.drive = staticmethod(drive)
    # Torch looks these names up at each use. `setattr` is needed because mypy rejects a direct
    # assignment to names that the module does not export.
    replaced: list[tuple[object, str, object]] = [
        (launcher_api, "LocalElasticAgent", FtrunElasticAgent),
        (multiprocessing_api, "get_subprocess_handler", starter),
        (torchrun, "config_from_args", lambda _args: config),
    ]
    # A DNS look-up per event would take longer than the restart that it reports.
    host_name = getattr(agent_api, "_get_fq_hostname", None)
    if host_name is not None:
        replaced.append((agent_api, "_get_fq_hostname", cache(host_name)))
    for module, name, ours in replaced:
        setattr(module, name, ours)
    torchrun.run(args)  # type: ignore[no-untyped-call]
