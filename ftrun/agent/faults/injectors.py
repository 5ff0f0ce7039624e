"""Prepares the faults that the agent injects on its node.

Runs in the main thread. FaultRefused names the missing requirement.

Rule 1: if possible, checks run when the order is accepted, not when the fault is due.
Rule 2: a reverter, which outlives the agent, ends each fault that has a duration.
"""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ftrun import clock
from ftrun.agent.cluster.control_loop import ClusterControlLoop
from ftrun.agent.faults import corruption, machine
from ftrun.agent.faults.network import link_fault
from ftrun.agent.faults.reverter import FaultAction, RunningFault
from ftrun.agent.faults.reverter_process import named
from ftrun.agent.launch.warm_start import WorkerHandle
from ftrun.agent.observe.proc import cores_used
from ftrun.errors import FaultRefused
from ftrun.urls import is_url
from ftrun.wire.fault_orders import FAULT_PREFIX
from ftrun.wire.messages.faults import FaultOrder

if TYPE_CHECKING:
    from ftrun.agent.launcher import Run

_PERIOD_US = 20_000
"""Quota period of the cpu cgroup; short, so that a rank is slowed evenly."""

_KILL_WAIT_S = 10.0
_MIB = 1 << 20


class FaultInjectors:
    """All faults that an agent injects."""

    def __init__(self, run: "Run") -> None:
        self._run = run
        self._makers: dict[str, Callable[[FaultOrder], FaultAction]] = {
            "rank-kill": lambda order: self._signal_rank(order, signal.SIGKILL),
            "stop": lambda order: self._signal_rank(order, signal.SIGSTOP),
            "slow": self._slow,
            "smp-kill": self._smp_kill,
            "smp-stop": self._smp_stop,
            "agent-kill": self._agent_kill,
            "leader-kill": self._leader_kill,
            "agent-stop": self._agent_zombie,
            "zygote-kill": self._zygote_kill,
            "node-loss": self._node_loss,
            "freeze": self._freeze,
            "shm-full": lambda order: machine.fill(order, Path("/dev/shm"), "/dev/shm"),
            "disk-full": lambda order: machine.fill(order, Path(run.spec.log_folder), "the logs"),
            "fd-limit": machine.fd_limit,
            "pid-limit": lambda order: machine.pid_limit(order, self._children()),
            "cpu-starve": machine.cpu_starve,
            "clock-jump": machine.clock_jump,
            "bitflip-wire": self._bitflip_wire,
            "bitflip-shm": self._bitflip_shm,
            "fragment-truncate": self._fragments,
            "fragment-stale": self._fragments,
            "corrupt-checkpoint": self._corrupt_checkpoint,
            **dict.fromkeys(
                ("partition", "one-way-partition", "slow-link", "lossy-link"), self._link
            ),
        }

    def action(self, order: FaultOrder) -> FaultAction:
        return self._makers[order.kind](order)

    def rank(self, rank: int) -> WorkerHandle:
        for handle in self._run.workers.alive():
            if handle.slot.rank == rank:
                return handle
        raise FaultRefused(
            f"rank {rank} does not run on this node at the moment. Retry in a few seconds"
        )

    def make_room_for_oom(self, order: FaultOrder) -> RunningFault:
        """Create a memory cgroup for this rank, so that an oom affects no other process."""
        pid = self.rank(order.rank).pid
        limit_bytes = int(order.amount * _MIB)
        if not 16 <= order.amount <= 1 << 20:
            raise FaultRefused(f"--amount is 16 to 1048576 MiB, not {order.amount:g}")
        machine.check_free(pid)
        group = machine.make_group("memory", f"{FAULT_PREFIX}{order.id}", pid)
        try:
            if group.is_v2:
                group.set("memory.max", limit_bytes)
                if group.has("memory.swap.max"):
                    group.set("memory.swap.max", 0)
            else:
                group.set("memory.limit_in_bytes", limit_bytes)
                if group.has("memory.memsw.limit_in_bytes"):
                    group.set("memory.memsw.limit_in_bytes", limit_bytes)
        except OSError as error:
            group.remove()
            raise FaultRefused(f"no limit can be set in {group.path}: {error.strerror}") from None
        # With --at-step, the rank must not be limited before that step, so it moves into the
        # cgroup itself at that step.
        return group.take([] if order.at_step else [pid], targets=[pid], for_s=0.0)

    # --- ranks --------------------------------------------------------------------------------

    def _signal_rank(self, order: FaultOrder, number: int) -> FaultAction:
        handle, is_stop = self.rank(order.rank), number == signal.SIGSTOP

        def do() -> RunningFault | None:
            since_s = clock.now_s()
            handle.child.signal(number)
            return self.continue_rank(handle, order, since_s) if is_stop else None

        return FaultAction(f"{signal.Signals(number).name} to pid {handle.pid}", do)

    def continue_rank(
        self, handle: WorkerHandle, order: FaultOrder, since_s: float
    ) -> RunningFault | None:
        """Send SIGCONT `for_s` after `since_s`, from which the agent's time limit counts too.

        Never if `for_s` is 0.
        """
        try:
            return continue_later(named(handle.pid), order.for_s, since_s=since_s)
        finally:
            self._run.workers.stopped_by_order(handle, since_s)

    def _slow(self, order: FaultOrder) -> FaultAction:
        handle = self.rank(order.rank)
        if not 0 < order.amount < 1024:
            raise FaultRefused(f"--amount is a fraction of a core above 0, not {order.amount:g}")
        machine.check_free(handle.pid)
        try:
            group = machine.make_group("cpu", f"{FAULT_PREFIX}{order.id}", handle.pid)
            group.remove()
        except FaultRefused:
            return self._slow_by_signals(order, handle)

        def do() -> RunningFault:
            made = machine.make_group("cpu", f"{FAULT_PREFIX}{order.id}", handle.pid)
            quota_us = max(1000, int(_PERIOD_US * order.amount))
            try:
                if made.is_v2:
                    made.set("cpu.max", f"{quota_us} {_PERIOD_US}")
                else:
                    made.set("cpu.cfs_period_us", _PERIOD_US)
                    made.set("cpu.cfs_quota_us", quota_us)
            except OSError as error:
                made.remove()
                raise FaultRefused(f"no quota can be set in {made.path}: {error}") from None
            return made.take([handle.pid], targets=[handle.pid], for_s=order.for_s)

        uses = cores_used(handle.pid)
        how = f"a cpu cgroup with {order.amount:g} of a core"
        if uses < order.amount:
            how += (
                f". The rank uses {uses:.2f} of a core now, so this does not slow it. Use a "
                f"smaller --amount, such as {max(0.01, uses / 2):.2f}"
            )
        return FaultAction(how, do)

    def _slow_by_signals(self, order: FaultOrder, handle: WorkerHandle) -> FaultAction:
        if order.amount >= 1:
            raise FaultRefused(
                "without a cpu cgroup, a rank can only be slowed to less than 1 core"
            )

        def do() -> RunningFault:
            target = named(handle.pid)
            return RunningFault(
                [["beat", order.amount]],
                [["signal", signal.SIGCONT, target]],
                for_s=order.for_s,
                targets=target,
            )

        return FaultAction(f"SIGSTOP for {1 - order.amount:.0%} of the time (no cpu cgroup)", do)

    # --- components of ftrun ------------------------------------------------------------------

    def _smp_kill(self, _: FaultOrder) -> FaultAction:
        return _kill(self._smp_pid())

    def _smp_stop(self, order: FaultOrder) -> FaultAction:
        target = named(self._smp_pid())

        def do() -> RunningFault | None:
            since_s = clock.now_s()
            os.kill(target[0][0], signal.SIGSTOP)
            return continue_later(target, order.for_s, since_s=since_s)

        return FaultAction(f"SIGSTOP to pid {target[0][0]}, SIGCONT after {order.for_s:g} s", do)

    def _smp_pid(self) -> int:
        smp = self._run.smp
        if smp.child is not None and smp.child.status is None:
            return smp.child.pid
        if smp.channel is None:
            raise FaultRefused("there is no SMP on this node at the moment. Retry in a few seconds")
        return smp.channel.peer_pid

    def _agent_kill(self, _: FaultOrder) -> FaultAction:
        return _kill(os.getpid(), is_last=True)

    def _leader_kill(self, order: FaultOrder) -> FaultAction:
        if not self._run.control_loop.leads:
            raise FaultRefused("this node is no longer the leader. Run the command again")
        return self._agent_kill(order)

    def _agent_zombie(self, order: FaultOrder) -> FaultAction:
        target = named(os.getpid())

        steps = ([["signal", signal.SIGSTOP, target]], [["signal", signal.SIGCONT, target]])
        do = partial(RunningFault, *steps, for_s=order.for_s, waits=False)
        return FaultAction(f"SIGSTOP to pid {os.getpid()} for {order.for_s:g} s", do, is_last=True)

    def _zygote_kill(self, _: FaultOrder) -> FaultAction:
        zygote = self._run.workers.starter.zygote
        child = zygote.child if zygote is not None else None
        if child is None or child.status is not None:
            raise FaultRefused("there is no zygote on this node: ranks are started fresh")
        how = f"SIGKILL to pid {child.pid}"
        return FaultAction(how, lambda: child.signal(signal.SIGKILL))

    # --- the node -----------------------------------------------------------------------------

    def _stub_pid(self) -> int:
        return int(os.environ.get("FTRUN_STUB_PID", os.getppid()))

    def _node_loss(self, _: FaultOrder) -> FaultAction:
        stub = self._stub_pid()
        if stub == 1:
            raise FaultRefused(
                "ftrun is process 1 of this container, so no process in it can kill ftrun. Start "
                "ftrun below an init, or kill the container from outside"
            )
        smp = self._smp_if_running()

        kill = signal.SIGKILL
        # An SMP that has outlived an earlier stub is not a descendant of this stub.
        steps = [["signal", signal.SIGSTOP, smp], ["tree", kill, stub], ["signal", kill, smp]]
        do = partial(RunningFault, steps, [], waits=False)
        return FaultAction(
            f"SIGKILL to all processes of this run on this node, including stub {stub}",
            do,
            is_last=True,
        )

    def _freeze(self, order: FaultOrder) -> FaultAction:
        stub = self._stub_pid()
        root = os.getpid() if stub == 1 else stub
        smp = self._smp_if_running()

        stop, resume = signal.SIGSTOP, signal.SIGCONT
        do = partial(
            RunningFault,
            [["tree", stop, root], ["signal", stop, smp]],
            [["signal", resume, smp], ["tree", resume, root]],
            for_s=order.for_s,
            waits=False,
        )
        return FaultAction(
            f"SIGSTOP to all processes of this run on this node for {order.for_s:g} s",
            do,
            is_last=True,
        )

    def _smp_if_running(self) -> list[tuple[int, int]]:
        with suppress(FaultRefused):
            return named(self._smp_pid())
        return []

    def _children(self) -> list[int]:
        run = self._run
        zygote = run.workers.starter.zygote
        children = [run.smp.child, zygote.child if zygote is not None else None]
        children += [handle.child for handle in run.workers.alive()]
        return [child.pid for child in children if child is not None and child.status is None]

    # --- links --------------------------------------------------------------------------------

    def _link(self, order: FaultOrder) -> FaultAction:
        spec, plan = self._run.spec, self._run.control_loop.plan
        if spec.nodes is None or plan is None:
            raise FaultRefused("this run has one node, so it has no link to another node")
        card = plan.card(spec.nodes.node_id)
        if card is None:
            raise FaultRefused(
                "this node is not part of the run at the moment. Retry in a few seconds"
            )
        fault = link_fault(order, host=card.host, is_allowed_anywhere=spec.allow_network_faults)

        do = partial(RunningFault, fault.do, fault.undo, for_s=order.for_s)
        is_cut = order.kind in ("partition", "one-way-partition")
        return FaultAction(fault.how, do, is_answered_first=is_cut)

    def _bitflip_wire(self, _: FaultOrder) -> FaultAction:
        control = self._run.control_loop
        thread = control.thread if isinstance(control, ClusterControlLoop) else None
        if thread is None:
            raise FaultRefused("this run has one node, so it sends no frames to other nodes")
        how = "the last bit of the next frame to each other agent"
        return FaultAction(how, thread.corrupt_next)

    # --- data ---------------------------------------------------------------------------------

    def _bitflip_shm(self, order: FaultOrder) -> FaultAction:
        handle = self.rank(order.rank)
        arenas = self._run.smp.memory.arenas
        local = [slot.rank for slot in self._run.workers.slots]
        newest = corruption.newest_common(arenas, local)

        def do() -> None:
            handle.child.signal_group(signal.SIGKILL)
            handle.child.signal(signal.SIGKILL)
            if not handle.child.wait(_KILL_WAIT_S):
                raise FaultRefused(f"rank {order.rank} has not ended, so its memory is not changed")
            corruption.flip_from(arenas, order.rank, corruption.newest_common(arenas, local))

        return FaultAction(
            f"rank {order.rank} dies, one bit flips in step {newest.step} or later", do
        )

    def _fragments(self, order: FaultOrder) -> FaultAction:
        parity_regions = list(self._run.smp.memory.parity_regions.values())
        corrupt = (
            corruption.truncate if order.kind == "fragment-truncate" else corruption.make_stale
        )
        corruption.check_kept(parity_regions, at_least=1 if corrupt is corruption.truncate else 2)
        how = "in the parity regions, which hold data of other nodes"
        return FaultAction(how, lambda: corrupt(parity_regions))

    def _corrupt_checkpoint(self, _: FaultOrder) -> FaultAction:
        directory = self._run.spec.checkpoint_directory
        if directory is None:
            raise FaultRefused("this run writes no checkpoints: --checkpoint-dir DIR")
        if is_url(directory):
            raise FaultRefused("this run writes its checkpoints to a URL, not to a directory")
        find = partial(corruption.newest_file, Path(directory))
        find()
        how = f"one bit in the newest checkpoint in {directory}"
        return FaultAction(how, lambda: corruption.flip_in_file(find()))


def _kill(pid: int, *, is_last: bool = False) -> FaultAction:
    return FaultAction(
        f"SIGKILL to pid {pid}", lambda: os.kill(pid, signal.SIGKILL), is_last=is_last
    )


def continue_later(
    target: list[tuple[int, int]], for_s: float, *, since_s: float
) -> RunningFault | None:
    """Start a reverter that sends SIGCONT `for_s` after `since_s`; None if `for_s` is 0."""
    if not for_s:
        return None
    undo = [["signal", signal.SIGCONT, target]]
    return RunningFault([], undo, for_s=for_s, since_s=since_s, targets=target)
