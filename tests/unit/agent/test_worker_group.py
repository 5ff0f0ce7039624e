"""The whole process tree of a rank is stopped and ended, and no other process."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.kernel_hang import kernel_hang

WAIT_S = 600.0

SETUP = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from ftrun import linux, process_tree
from ftrun.agent.launch.process import ChildProcess, spawn
from ftrun.agent.snapshots.smp_client import AgentSmpClient
from ftrun.agent.launch.worker_group import WorkerGroup
from ftrun.agent.launch.warm_start import LaunchSlot, WorkerHandle, WorkerStarter
from ftrun.config.run_spec import RunSpec
from ftrun.journal import Journal
from ftrun.linux import become_subreaper
from ftrun.wire.messages.worker import LaunchRequest, encode_launch
from ftrun.wire.shared_memory.pages import SharedPage, create_page
from ftrun.wire.run_environment import RunFolder

def group_of(*commands, stuck_pids=()):
    become_subreaper()
    spec = RunSpec(run_id="r", script="s", torchrun_argv=[], log_folder=".", cwd=".")
    starter = WorkerStarter(None, Journal(Path(".")))
    smp = AgentSmpClient(RunFolder(Path(".")), 1.0)
    group = WorkerGroup(spec, smp=smp, starter=starter, stuck_pids=stuck_pids)
    for rank, command in enumerate(commands):
        fd = create_page("rank")
        fds = {"heartbeat": fd, "stack": fd}
        request = LaunchRequest(0, rank, len(commands), os.getpid(), "", descriptors=fds)
        slot = LaunchSlot(request, SharedPage(fd))
        variables = {**os.environ, "FTRUN_LAUNCH": encode_launch(request).decode()}
        child = spawn(["sh", "-c", command], name="rank", variables=variables, new_session=True)
        starter.handles[rank] = WorkerHandle(rank, child, slot, "fresh")
    return group

def until(is_so):
    give_up_s = time.monotonic() + 600
    while not is_so():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)

def number_in(name):
    until(lambda: Path(name).exists() and Path(name).read_text().endswith("\\n"))
    return int(Path(name).read_text())
"""

TREES = """
trainer = "setsid sh -c 'echo $$ > inner; sleep 600; :'; :"
daemon = "(setsid sh -c 'echo $$ > daemon; sleep 600; :' &); sleep 600; :"
bare = "exec setsid env -i PATH=$PATH sh -c 'echo $$ > bare; sleep 600; :'"
group = group_of(trainer, daemon, f"sh -c \\"{bare}\\"; :")
helper = subprocess.Popen(["sleep", "600"])
inner, orphan, unmarked = (number_in(name) for name in ("inner", "daemon", "bare"))
assert process_tree.session_of(unmarked) == unmarked
until(lambda: process_tree.parent_of(orphan) == os.getpid())

group.suspend(True)
until(lambda: process_tree.state_of(inner) == "T")
group.suspend(False)
until(lambda: process_tree.state_of(inner) == "S")

group.kill()
assert not process_tree.left_behind(Path("none"))
for pid in (inner, orphan, unmarked, *group.pids()):
    assert process_tree.state_of(pid) in ("", "Z"), pid
assert helper.poll() is None, "no rank has started it"
helper.kill()
print("clean")
"""

SUSPENDED = """
group = group_of("trap 'echo got > got' USR2; while true; do sleep 0.05; done")
time.sleep(0.2)
group.suspend(True)
until(lambda: process_tree.state_of(group.pids()[0]) == "T")
group.signal(signal.SIGUSR2)
time.sleep(0.2)
assert process_tree.state_of(group.pids()[0]) == "T"
assert not Path("got").exists()
group.suspend(False)
until(lambda: Path("got").exists())
group.kill()
print("clean")
"""

TWO_INTERRUPTS = """
from ftrun import clock
from ftrun.agent.loop import RunSignals
group = group_of("sleep 600")
spec = RunSpec(run_id="r", script="s", torchrun_argv=[], log_folder=".", cwd=".")
signals = RunSignals(spec, journal=Journal(Path(".")), workers=group)
signals.catch()
for pause_s in (0.0, 0.01, 0.6):  # the second one is a copy, which the stub forwards
    time.sleep(pause_s)
    os.kill(os.getpid(), signal.SIGINT)
time.sleep(0.6)  # the main thread is busy
signals.handle()
assert signals.stops == 2, signals.stops
group.kill()
print("clean")
"""

GROUP_DIES_FIRST = """
group = group_of("sleep 600 & echo $! > left; exit 3")
left = number_in("left")
until(group.ended)
(handle,) = group.handles
assert handle.child.status == 3
until(lambda: process_tree.state_of(left) in ("", "Z"))
"""

HANGS_IN_THE_KERNEL = """
from ftrun.agent.launch import rank_trees
rank_trees.KILL_WAIT_S = 0.5
linux.DEVICE_FILES = (os.getcwd(),)
group = group_of("exec 9> card; sleep 600", "sleep 600")
held = Path(sys.argv[1])
(held / "cgroup.procs").write_text(str(group.pids()[0]))
(held / "freezer.state").write_text("FROZEN")
until(lambda: process_tree.state_of(group.pids()[0]) == "D")
reason = group.kill()
found = f"rank 0 with {os.getcwd()}/card open (pid {group.pids()[0]}) has not died of SIGKILL"
assert found in reason, reason
assert group.used_device
assert "rank 1" not in reason
assert group.stuck() == group.kill() == reason, "it is not waited for again"
(held / "freezer.state").write_text("THAWED")
until(lambda: not group.stuck())
assert [handle.child.status for handle in group.handles] == [-9, -9]
assert group.kill() == ""
print("clean")
"""

REPORTED = """
# A node whose ranks have ended is not reported as running.
from types import SimpleNamespace
from ftrun.agent.report import NodeReporter
group = group_of("sleep 600")
reported = []
repeats = SimpleNamespace(warning="")
generations = SimpleNamespace(number=0, is_member=True, is_alone=True, repeats=repeats,
                              fault="", restart_times=lambda now_s: None)
maintenance = SimpleNamespace(smp_given_up="", checkpoints=SimpleNamespace(newest_order=None))
observer = SimpleNamespace(p99_s=0.0, views=(), sample=None)
signals = SimpleNamespace(stops=0, stop_signal=0, leaves=False)
control_loop = SimpleNamespace(post=lambda here: reported.append(here.heartbeat))
report = NodeReporter(SimpleNamespace(
    control_loop=control_loop, journal=Journal(Path(".")), workers=group, generations=generations,
    maintenance=maintenance, smp=group._smp, rank_observer=observer, signals=signals, rpc=None,
))

def state():
    report.send(is_urgent=False)
    return reported[-1].state

found = [state()]
group.suspend(True)
found.append(state())
group.suspend(False)
found.append(state())
group.kill()
found.append(state())
assert found == ["running", "held", "running", "idle"], found
assert reported[-1].generation == 0, "its ranks have ended, and its members are still these"
print("clean")
"""

STOPPED_BY_ORDER = """
from ftrun.agent.faults.injectors import continue_later
from ftrun.agent.faults.reverter_process import named
group = group_of("sleep 600", "sleep 600")
for handle in group.handles:
    handle.child.signal(signal.SIGSTOP)
    until(handle.child.is_stopped)
soon, late = group.handles
since_s = time.monotonic() - 100.0
group._polled_s = since_s  # it has started a reverter in this time
active_fault = continue_later(named(soon.pid), 99.0, since_s=since_s)
until(lambda: not soon.child.is_stopped())
until(active_fault.is_over)
for handle in group.handles:
    group.stopped_by_order(handle, since_s)
group.kill_long_stopped(since_s + 100.0, 99.5)
assert soon.killed_for_s is None and soon.stopped_since_s is None
assert late.killed_for_s == 100.0
group.kill()
print("clean")
"""

LOGS = """
group = group_of("exit 3", "exit 4", "exit 5")
for rank in range(3):
    folder = Path(str(rank))
    folder.mkdir()
    (folder / "stderr.log").write_text("OSError: [Errno 28] No space left on device\\n")
    (folder / "error.json").write_text(json.dumps({"message": {
        "message": "MemoryError: 1 GB" if rank else "RuntimeError: Connection reset by peer",
        "extraInfo": {"py_callstack": f"of {rank}", "timestamp": f"{rank}00"}}}))
    group._error_files[rank] = str(folder / "error.json")
handles = group.handles
for handle in handles:
    assert handle.child.wait(60)
exits = group.explain(handles, oom_kills=0)
assert [one.rank for one in exits] == [0, 1, 2]
classes = [[one.error_class for one in end.errors] for end in exits]
assert classes == [[], ["out of memory", "disk full"], []], classes

never, _ = os.pipe()
pread = os.pread
def on_a_dead_mount(fd, size, at):
    is_log = os.readlink(f"/proc/self/fd/{fd}").endswith("stderr.log")
    return os.read(never, 1) if is_log else pread(fd, size, at)
os.pread = on_a_dead_mount
before_s = time.monotonic()
for _ in range(20):
    exits = group.explain(handles, oom_kills=0)
    classes = [[one.error_class for one in end.errors] for end in exits]
    assert classes == [[], ["out of memory"], []], classes
assert 0.5 <= time.monotonic() - before_s < 5.0
print("clean", flush=True)
"""

NUMBER_IS_TAKEN_AGAIN = """
child = spawn(["true"], name="rank", variables=os.environ, new_session=True)
assert child.wait(60)
Path("/proc/sys/kernel/ns_last_pid").write_text(str(child.pid - 1))
stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
assert stranger.pid == child.pid
child.signal_group(signal.SIGKILL)
child.signal(signal.SIGKILL)
time.sleep(0.2)
assert stranger.poll() is None, "a stranger was killed"
stranger.kill()
print("clean")
"""


def output_of(
    code: str, folder: object, *before: str, words: Sequence[object] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-c", SETUP + code, *map(str, words)],
        cwd=str(folder),
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )


OF_AN_EARLIER_AGENT = """
left = subprocess.Popen(["sh", "-c", "sleep 600 & echo $! > left"], start_new_session=True)
pid = number_in("left")
left.wait()
until(lambda: process_tree.parent_of(pid) != left.pid)
group = group_of(stuck_pids=[pid, left.pid])
assert f"an earlier rank (pid {pid}) has not died" in group.stuck()
os.kill(pid, signal.SIGKILL)
until(lambda: not group.stuck())
print("clean")
"""


@pytest.mark.parametrize(
    "code",
    [TREES, GROUP_DIES_FIRST + REPORTED, OF_AN_EARLIER_AGENT, SUSPENDED, TWO_INTERRUPTS],
    ids=["trees", "own-end", "earlier-agent", "suspended", "interrupts"],
)
def test_what_ranks_have_started_stops_and_ends_with_them(code: str, tmp_path: object) -> None:
    done = output_of(code, tmp_path)
    assert done.stdout == "clean\n", done.stderr


def test_the_log_of_the_first_cause_is_read_and_a_dead_file_system_delays_no_exit(
    tmp_path: Path,
) -> None:
    done = output_of(LOGS, tmp_path)
    assert done.stdout == "clean\n", done.stderr


def test_an_ordered_stop_and_its_limit_count_from_the_same_moment(tmp_path: Path) -> None:
    done = output_of(STOPPED_BY_ORDER, tmp_path)
    assert done.stdout == "clean\n", done.stderr


def test_a_rank_that_hangs_in_the_kernel_is_named_until_it_has_died(tmp_path: Path) -> None:
    with kernel_hang() as hang:
        done = output_of(HANGS_IN_THE_KERNEL, tmp_path, words=[hang.folder])
    assert done.stdout == "clean\n", done.stderr


def test_no_signal_reaches_a_later_process_of_the_same_number(tmp_path: object) -> None:
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*unshare, "true"], check=False).returncode
    ):
        pytest.skip("needs an own pid namespace")
    done = output_of(NUMBER_IS_TAKEN_AGAIN, tmp_path, *unshare, "--kill-child")
    assert done.stdout == "clean\n", done.stderr
