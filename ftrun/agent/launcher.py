"""Assembles the components of a run and starts torch's launcher.

Runs in the main thread. It is the first module of the agent that imports torch.
"""

import logging
import os
import socket
import sys
from argparse import Namespace
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from ftrun import clock
from ftrun.agent.cluster.control_loop import ControlLoop
from ftrun.agent.cluster.node import LocalNode
from ftrun.agent.cluster.rpc import ClusterRpc
from ftrun.agent.executor import RunEnded
from ftrun.agent.faults.controller import FaultController
from ftrun.agent.launch import elastic
from ftrun.agent.launch.agent_start import unknown_torch
from ftrun.agent.launch.generation import GenerationRunner
from ftrun.agent.launch.parking import report_nccl_errors
from ftrun.agent.launch.process import one_oom_ends_all
from ftrun.agent.launch.rehearsals import Rehearsals
from ftrun.agent.launch.rendezvous import LOOPBACK, StorePool, register
from ftrun.agent.launch.warm_start import WorkerStarter
from ftrun.agent.launch.worker_group import WorkerGroup
from ftrun.agent.launch.zygote_client import ZygoteClient
from ftrun.agent.loop import RunLoop, RunSignals
from ftrun.agent.maintenance import Maintenance
from ftrun.agent.notices.watcher import NoticeWatcher
from ftrun.agent.observe.device_memory import DeviceMemory, used_by_nvml
from ftrun.agent.observe.evidence import EXCEPTION_S, BoundedReads
from ftrun.agent.observe.node_check import NodeCheck
from ftrun.agent.observe.ranks import RankObserver
from ftrun.agent.observe.recorder_dumps import DUMPS, has_nccl_devices
from ftrun.agent.publish.control_server import ControlServer
from ftrun.agent.publish.observers import Observers
from ftrun.agent.snapshots.retained_memory import PersistedAgentState, StubClient
from ftrun.agent.snapshots.smp_client import AgentSmpClient
from ftrun.config.run_spec import RunSpec
from ftrun.errors import ExitCode, PeerError, UsageError
from ftrun.journal import Journal
from ftrun.records.run import RunEndedRecord, RunStarted
from ftrun.records.snapshots import FreshStartUsed, SmpUnavailable, SmpUnreachable
from ftrun.recovery.commands import EndRun
from ftrun.urls import without_password
from ftrun.wire.messages.agent_start import STUCK_PIDS, decode_numbers

MAX_TRACE_LINES = 12

_log = logging.getLogger("ftrun")


def retained_lines(
    step: int,
    directory: str | None,
    checkpoint_step: int | None,
    not_written: str,
    part_step: int | None = None,
) -> list[str]:
    """What remains of a stopped run.

    Args:
        step: the last step that any rank completed.
        directory: of checkpoints; None: none are written.
        checkpoint_step: of the last checkpoint that was written.
        not_written: why no later checkpoint was written.
        part_step: of this node's newest part, if other nodes have not written theirs.
    """
    found = [f"  stopped at   step {step}"]
    if directory is None:
        return [
            *found,
            "  kept         nothing: snapshots were in memory only, and are freed",
            "  to resume    start it with --checkpoint-dir DIR: its last step is then written at "
            "the end",
        ]
    if part_step is not None and part_step > (checkpoint_step or -1):
        return [
            *found,
            f"  kept         this node's part of step {part_step} in {directory}: a checkpoint as "
            "soon as all nodes have written theirs",
            "  to resume    start the same command again",
        ]
    if checkpoint_step is None:
        reason = not_written or "no snapshot was committed yet"
        return [*found, f"  kept         nothing in {directory}: {reason}"]
    found.append(f"  kept         step {checkpoint_step} in {directory}")
    if checkpoint_step < step:
        reason = not_written or "no later snapshot was committed"
        steps = f"steps {checkpoint_step + 1} to {step}"
        found.append(f"               {steps} are not kept: {reason}")
    return [*found, "  to resume    start the same command again"]


def final_block(
    command: EndRun,
    spec: RunSpec,
    generations: GenerationRunner,
    kept: list[str],
) -> str:
    """The final text for the operator; `kept` are `retained_lines`."""
    restarts = len(generations.restarts)
    noun = "restart" if restarts == 1 else "restarts"
    code = int(command.exit_code)
    lines = [
        f"ftrun: run {spec.run_id} ended with exit code {code} after {restarts} {noun}: "
        f"{command.reason}"
    ]
    if command.run_continues:
        lines = [
            f"ftrun: this node has left run {spec.run_id} with exit code {code}: {command.reason}"
        ]
    if command.cause is not None:
        lines.append(f"  first cause  {command.cause.text}")
        lines += _trace(command.cause.detail)
    lines += kept
    if command.advice:
        lines.append(f"  what to do   {command.advice}")
    if command.exit_code == ExitCode.DO_NOT_RESTART:
        lines.append("               A scheduler should not start this again (exit code 93).")
    lines.append(f"  journal      {spec.log_folder}/journal.jsonl")
    return "\n".join(lines) + "\n"


def _trace(detail: str) -> list[str]:
    if not detail:
        return []
    lines = [line for line in detail.rstrip().splitlines() if line.strip()]
    left_out = len(lines) - MAX_TRACE_LINES
    shown = lines[-MAX_TRACE_LINES:]
    head = [f"  where        (the last {len(shown)} of {len(lines)} lines)"] if left_out > 0 else []
    return head + [f"    {line}" for line in shown]


def launch(
    spec: RunSpec,
    journal: Journal,
    smp: AgentSmpClient,
    zygote: ZygoteClient | None,
    stub: StubClient,
    *,
    kept: PersistedAgentState,
    preflight: NodeCheck,
) -> int:
    """Run to the end; return the exit code of the started process."""
    args = elastic.parse(spec)
    num_ranks, config = elastic.local_world_size(args), elastic.launch_config(args)
    zygote = _fit(zygote, journal)
    if zygote is not None:
        zygote.want(num_ranks)
    node = LocalNode.of(spec, num_ranks, kept)
    stores = _stores(args, node)
    register(stores)
    run = _assemble(journal, smp, zygote, stub, stores, node=node, kept=kept)
    _connect_smp(run)
    run.signals.catch()  # the stub forwards waiting signals as soon as the control server listens
    run.publish_status()
    faults = FaultController(run) if spec.allow_faults else None
    if run.rpc is not None:
        run.rpc.faults = faults
    loop = RunLoop(run, faults)
    server = ControlServer(run, faults)
    server.start()
    if spec.profile.monitor.enabled:
        run.rank_observer.start()
    run.start()
    if one_oom_ends_all():
        _log.warning(
            "memory.oom.group is 1: if one rank is out of memory, all processes of this node end"
        )
    logs = os.path.abspath(args.log_dir)
    journal.write(RunStarted(spec.run_id, spec.script, str(torch.__version__), logs, args.rdzv_id))
    preflight.first()
    node.start(run, preflight)
    is_over = False
    try:
        elastic.run(args, config, run.workers.starter, loop.drive)
        is_over = True
    except RunEnded as ended:
        _report_end(ended.command, spec, run)
        is_over = ended.command.exit_code != ExitCode.NOT_ENOUGH_NODES  # others may train
        return int(ended.command.exit_code)
    finally:
        server.stop()
        if faults is not None:
            faults.close()
        run.rank_observer.close()
        run.close()
        preflight.close()
        leads = run.control_loop.leads and not loop.executor.has_left
        node.forget_secret(is_over=is_over and leads)
        run.control_loop.close()
    journal.write(RunEndedRecord(0))
    return 0


@dataclass
class Run:
    """The parts of a run on one node; each part uses the others through it."""

    spec: RunSpec
    journal: Journal
    smp: AgentSmpClient
    node: LocalNode
    stores: StorePool
    workers: WorkerGroup
    generations: GenerationRunner
    control_loop: ControlLoop

    def __post_init__(self) -> None:
        spec, logs = self.spec, Path(self.spec.log_folder)
        self.started_s = clock.now_s()
        self.signals = RunSignals(spec, journal=self.journal, workers=self.workers)
        self.rpc: ClusterRpc | None = None
        if not self.node.is_alone:
            # Each node has its own journal. The merged journal is next to them, on the leader.
            self.rpc = ClusterRpc(self.control_loop, self.journal, logs.parent)
            self.rpc.leave = self.signals.ask_leave
        self.rank_observer = RankObserver(
            self.workers.unused_fds, spec.profile.hang, logs / DUMPS, self.workers.written_errors
        )
        self.notices = NoticeWatcher(spec.profile.notices, self.journal, self.signals.ask_leave)
        self.device_memory = DeviceMemory(used_by_nvml(), limit_s=spec.profile.start.device_wait_s)
        self.rehearsals = Rehearsals(self)
        self.workers.rehearsed = self.rehearsals.begin_generation
        self.maintenance = Maintenance(self)
        self.observers = Observers(self)

    def start(self) -> None:
        if self.spec.profile.restart.survivors == "on" and has_nccl_devices():
            report_nccl_errors(os.environ)
        self.observers.start()
        self.notices.start()

    def close(self) -> None:
        self.notices.close()
        self.observers.close()

    def publish_status(self) -> None:
        """Called before a long operation, during which no status is published."""
        self.observers.status.publish()

    def send_lines(self) -> None:
        if self.rpc is not None:
            self.rpc.pass_lines_on(at_once=True)

    def before_end(self) -> None:
        self.observers.at_end()
        self.send_lines()

    def observe(self, now_s: float) -> None:
        self.observers.poll(now_s)
        if self.rpc is not None:
            self.rpc.pass_lines_on()


def _assemble(
    journal: Journal,
    smp: AgentSmpClient,
    zygote: ZygoteClient | None,
    stub: StubClient,
    stores: StorePool,
    *,
    node: LocalNode,
    kept: PersistedAgentState,
) -> Run:
    spec = node.spec
    workers = WorkerGroup(
        spec,
        smp=smp,
        starter=WorkerStarter(zygote, journal),
        stuck_pids=decode_numbers(os.environ.get(STUCK_PIDS, "")),
    )
    generations = GenerationRunner(
        spec, node.card.node_id, journal=journal, smp=smp, stub=stub, workers=workers, kept=kept
    )
    return Run(spec, journal, smp, node, stores, workers, generations, node.control_loop(kept))


def _connect_smp(run: Run) -> None:
    """Connect to the SMP that was started, or to an SMP that outlived the last agent.

    Such an SMP may have closed the connection while this agent imported torch.
    """
    smp, node = run.smp, run.node
    is_new = smp.child is not None
    try:
        if is_new:
            smp.ready()
        node.introduce(smp)
    except PeerError as error:
        if is_new:
            run.journal.write(SmpUnavailable(str(error)))
            run.maintenance.smp_given_up = f"the snapshot manager does not start: {error}"
            return
        run.journal.write(SmpUnreachable(str(error)))
        smp.lost()
        with suppress(PeerError):
            if smp.reconnect():
                node.introduce(smp)
        # If the SMP has ended, this starts a new SMP before the first generation.
        run.maintenance.handle_exits()


def _stores(args: Namespace, node: LocalNode) -> StorePool:
    if not node.is_alone:
        return StorePool(node.card.host, 0, [rail.host for rail in node.card.rails])
    is_given = bool(args.master_addr) and args.master_addr not in ("localhost", LOOPBACK)
    host = _checked(args.master_addr) if is_given else node.card.host
    stores = StorePool(host, args.master_port or 0)
    stores.check()
    return stores


def _fit(zygote: ZygoteClient | None, journal: Journal) -> ZygoteClient | None:
    reason = unknown_torch(torch.__version__)
    if zygote is None or not reason:
        return zygote
    _log.warning("%s", reason)
    journal.write(FreshStartUsed(reason))
    zygote.close()
    return None


def _checked(host: str) -> str:
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise UsageError(
            f"--master-addr {host} has no address: {error.strerror or error}. Ranks connect to it. "
            "On one node leave it out (or unset PET_MASTER_ADDR)"
        ) from error
    return host


def _report_end(command: EndRun, spec: RunSpec, run: Run) -> None:
    run.journal.write(RunEndedRecord(int(command.exit_code), command.reason))
    cause = command.cause
    path = run.workers.error_file(cause.rank) if cause is not None else ""
    if path and "TORCHELASTIC_ERROR_FILE" in os.environ:
        # A process that started ftrun with its own error file finds the first cause there.
        BoundedReads().result(partial(_pass_on_error, path, command.exit_code), EXCEPTION_S)
    sys.stdout.flush()
    sys.stderr.write(final_block(command, spec, run.generations, _kept(command, spec, run)))
    sys.stderr.flush()


def _pass_on_error(path: str, exit_code: int) -> None:
    if os.path.exists(path):
        get_error_handler().dump_error_file(path, exit_code)


def _kept(command: EndRun, spec: RunSpec, run: Run) -> list[str]:
    """What remains of a stopped run; empty if the script does not attach, or the run failed."""
    is_stop = command.exit_code > 128 and command.cause is None and not command.run_continues
    # An agent that was started only to end the run has no ranks. The slots of its ranks show which
    # step they had reached.
    held = max((offer.step for offer in run.smp.memory.offers()), default=None)
    progress = run.workers.progress()
    if not is_stop or not (progress.attached or held is not None):
        return []
    directory, written, part = spec.checkpoint_directory, run.smp.last_checkpoint, run.smp.last_part
    return retained_lines(
        step=max(progress.step, held or 0),
        directory=None if directory is None else without_password(directory),
        checkpoint_step=None if written is None else written.step,
        not_written=run.maintenance.checkpoints.not_written,
        part_step=None if part is None else part.step,
    )
