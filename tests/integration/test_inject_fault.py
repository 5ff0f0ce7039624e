"""Every injected fault really happens, is recorded, and is reverted.

One run takes several faults, one after the other. Other tests cover the reaction of ftrun to a
fault; these only check that the run reaches the required state.
"""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftrun.cli.runs import inspect_run
from ftrun.errors import PeerError
from ftrun.wire.fault_orders import make_cancel, make_order
from ftrun.wire.messages.envelope import AnyMessage, Refused, StatusReply, StatusRequest
from ftrun.wire.messages.faults import FaultAccepted, InjectFault
from ftrun.wire.run_environment import RunId, run_folder
from tests.integration.conftest import WAIT_S, Run, Start, is_gone

TRAIN = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
import ftrun

if "loader" in sys.argv:
    batches = iter(DataLoader(torch.zeros(1 << 20, 1), batch_size=1))
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
plain = torch.nn.Linear(16, 16)
model = DistributedDataParallel(plain)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
session = ftrun.attach(model=model, optimizer=optimizer)
for step in session.steps(int(sys.argv[1])):
    if "loader" in sys.argv:
        begun = time.monotonic()
        next(batches)
        if time.monotonic() - begun > 0.8:
            print(f"late input rank={rank} step={step}", flush=True)
    optimizer.zero_grad()
    loss = model(torch.randn(4, 16)).pow(2).mean()
    loss.backward()
    if loss.item() != loss.item() or loss.item() > 100:
        print(f"bad loss rank={rank} step={step}", flush=True)
    optimizer.step()
    if os.path.exists("report"):
        weights = [p.detach().double().sum().item() for p in plain.parameters()]
        print(f"sums rank={rank} step={step} {weights}\\n", end="", flush=True)
    time.sleep(0.03)
    while os.path.exists("hold"):
        time.sleep(0.005)
dist.destroy_process_group()
"""

ALONE = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(1 << 30):
    weight.grad = torch.ones(1)
    dist.all_reduce(weight.grad)
    if weight.grad.item() != 2:
        print(f"alone rank={dist.get_rank()} step={step}", flush=True)
    optimizer.step()
    time.sleep(0.01)
"""

EMPTY = """
import time
import torch

weight = torch.nn.Parameter(torch.zeros(0))
optimizer = torch.optim.SGD([weight], lr=0.1)
while True:
    weight.grad = torch.zeros(0)
    optimizer.step()
    time.sleep(0.01)
"""
"""Like a rank without parameters under FSDP."""

FOREVER = str(1 << 30)
QUICK = ("--allow-faults", "--snapshot-every", "1", "--nproc-per-node", "2")

Script = Callable[..., str]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def asked(run: Run, *words: object) -> "subprocess.CompletedProcess[str]":
    """The output of `ftrun inject-fault`."""
    command = [sys.executable, "-m", "ftrun", "inject-fault", *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, env=run.variables, timeout=WAIT_S, check=False
    )


def order(run: Run, kind: str, **words: object) -> str:
    """Order a fault that must be accepted; its id."""
    wanted = make_order(f"t{uuid.uuid4().hex[:6]}", kind, **words)  # type: ignore[arg-type]
    answer = send(run, InjectFault(wanted))
    assert isinstance(answer, FaultAccepted), f"{kind}: {answer}"
    assert answer.id == wanted.id
    return wanted.id


def send(run: Run, message: AnyMessage) -> AnyMessage:
    """Send a message to the agent, as the command line does, but at once; its answer."""
    channel = inspect_run(run_folder(RunId(run.run_id))).to_agent()
    try:
        return channel.ask(message, deadline_s=WAIT_S).body
    finally:
        channel.close()


def status(run: Run) -> dict[str, Any]:
    answer = send(run, StatusRequest())
    assert isinstance(answer, StatusReply)
    return dict(json.loads(answer.document))


@contextlib.contextmanager
def held(run: Run) -> Iterator[int]:
    """The ranks wait at a boundary; the newest step that one of them has completed."""
    hold = run.folder / "hold"
    hold.touch()
    try:
        yield step_of(run)
    finally:
        hold.unlink()


def refused(run: Run, *words: object) -> str:
    done = asked(run, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr


def lines(run: Run, kind: str, fault_id: str) -> list[dict[str, object]]:
    return [line for line in run.journal(kind) if line["id"] == fault_id]


def fired(run: Run, fault_id: str) -> dict[str, object]:
    """Wait until the fault has fired; its line."""
    run.wait_until(f"{fault_id} fired", lambda: lines(run, "fault_injected", fault_id))
    return lines(run, "fault_injected", fault_id)[0]


def ended(run: Run, fault_id: str) -> None:
    run.wait_until(f"{fault_id} over", lambda: lines(run, "fault_reverted", fault_id))


def step_of(run: Run) -> int:
    return max(rank["step"] or 0 for rank in status(run)["ranks"])


def generation(run: Run) -> int:
    return len(run.journal("generation_started")) - 1


def check_continues(run: Run, at_generation: int, after_step: int) -> None:
    """Wait until every rank is some steps further, in this generation or a later one."""

    def is_so() -> bool:
        try:
            now = status(run)
        except PeerError:
            return False
        least = min((rank["step"] or 0 for rank in now["ranks"]), default=-1)
        return now["generation"] >= at_generation and least >= after_step + 3

    run.wait_until(f"beyond step {after_step}", is_so)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Two ranks that train without end: every test leaves them undisturbed."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "train.py").write_text(TRAIN)
    # A rank that an order has stopped waits for the test, which may be slow on a busy machine.
    words = ["restart.budget=100", "monitor.frozen_kill_after_s=60", "hang.suspect_after_s=60"]
    settings = [word for key in words for word in ("--set", key)]
    found = Run(folder, *QUICK, *settings, "train.py", FOREVER, "loader")
    try:
        check_continues(found, 0, 0)
        yield found
    finally:
        found.end()


def now_at(run: Run) -> tuple[int, list[int]]:
    """The generation, and the pids of its ranks."""
    check_continues(run, generation(run), step_of(run))
    return generation(run), run.pids()


def test_a_rank_dies_at_the_step_that_was_ordered(run: Run) -> None:
    expected = {
        "rank-kill": "killed by SIGKILL",
        "segv": "killed by SIGSEGV",
        "abort": "killed by SIGABRT",
        "exception": "RuntimeError: injected fault: ordered (rank 1",
    }
    for kind, words in expected.items():
        number, _ = now_at(run)
        with held(run) as step:
            at = step + 10
            fault_id = order(run, kind, rank=1, at_step=at)
        line = fired(run, fault_id)
        assert (line["step"], line["rank"]) == (at, 1)
        run.wait_until("restarted", lambda number=number: generation(run) > number)
        assert words in json.dumps(run.journal("workers_exited")[-1:])
        check_continues(run, number + 1, at)
        assert len(lines(run, "fault_injected", fault_id)) == 1, "it has fired again"


def test_an_order_outlives_its_rank_and_fires_once(run: Run) -> None:
    number, _ = now_at(run)
    with held(run) as step:
        at = step + 10
        later = order(run, "exception", rank=1, at_step=at)
        assert "has not fired yet" in refused(run, "segv", run.run_id, "--rank", 1)
        order(run, "rank-kill", rank=0)
        run.wait_until("restarted", lambda: generation(run) == number + 1)
    assert fired(run, later)["step"] == at
    run.wait_until("restarted again", lambda: generation(run) == number + 2)
    check_continues(run, number + 2, at)
    assert len(lines(run, "fault_injected", later)) == 1


def test_a_rank_that_leaves_early_is_missed(run: Run) -> None:
    number, pids = now_at(run)
    fired(run, order(run, "exit0-early", rank=1))
    run.wait_until("gone", lambda: is_gone(pids[1]))
    run.wait_until("restarted", lambda: generation(run) == number + 1)


def test_a_rank_is_paused_and_continues(run: Run) -> None:
    number, pids = now_at(run)
    for kind, letters in {"stop": "T", "hang": "S", "busy-loop": "R", "gil-hold": "S"}.items():
        used_s = cpu_s(pids[1])
        # A busy machine leaves a part of a core only to a rank that would use all of it.
        fault_id = order(run, kind, rank=1, for_s=3.0 if kind == "busy-loop" else 1.5)
        fired(run, fault_id)
        step = step_of(run)
        seen = {state(pids[1]) for _ in range(20) if not time.sleep(0.02)}
        later = step_of(run)
        if not lines(run, "fault_reverted", fault_id):
            assert seen & set(letters), f"{kind}: {seen}"
            assert later <= step + 1
        ended(run, fault_id)
        if kind == "busy-loop":
            assert cpu_s(pids[1]) - used_s > 0.2
        check_continues(run, number, step)
    assert run.pids() == pids


def last_sums(run: Run, after_step: int) -> dict[str, str]:
    """Of each rank at the same step."""
    by_step: dict[int, dict[str, str]] = {}
    for line in run.text.splitlines():
        if line.startswith("sums") and line.endswith("]"):
            _, rank, step, *sums = line.split()
            by_step.setdefault(int(step[5:]), {})[rank] = " ".join(sums)
    whole = [step for step, found in by_step.items() if len(found) == 2 and step > after_step]
    return by_step[max(whole)] if whole else {}


@pytest.mark.full  # test_hangs.py and test_numerical_anomalies.py inject them, too
def test_a_collective_is_skipped_and_numbers_go_bad(start: Start, script: Script) -> None:
    run = start(*QUICK, script(TRAIN), FOREVER)
    check_continues(run, 0, 0)
    never = order(run, "exception", rank=0, at_step=1 << 40)
    fault_id = order(run, "collective-skip", rank=1)
    step = int(str(fired(run, fault_id)["step"]))
    (run.folder / "report").touch()
    run.wait_until("the sums", lambda: last_sums(run, step + 1))
    found = last_sums(run, step + 1)
    assert found["rank=0"] != found["rank=1"], "rank 1 has taken part"
    for kind in ("spike", "nan"):
        before = run.text.count("bad loss")
        fired(run, order(run, kind, rank=1))
        run.wait_until(kind, lambda before=before: run.text.count("bad loss") > before)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143
    assert lines(run, "fault_injected", never) == []
    assert lines(run, "fault_reverted", never)[0]["reason"] == "it has not fired"


@pytest.mark.full
def test_an_explicit_collective_is_skipped(start: Start, script: Script) -> None:
    run = start(*QUICK, script(ALONE))
    check_continues(run, 0, 0)
    fault_id = order(run, "collective-skip", rank=1)
    fired(run, fault_id)
    run.wait_until("skipped", lambda: "alone rank=1" in run.text)


@pytest.mark.full
def test_what_a_rank_cannot_do_is_harmless_and_is_reported(start: Start, script: Script) -> None:
    run = start("--allow-faults", "--nproc-per-node", "1", script(EMPTY))
    check_continues(run, 0, 0)
    fault_id = order(run, "weight-bitflip", rank=0)
    ended(run, fault_id)
    (line,) = lines(run, "fault_reverted", fault_id)
    assert "not made: RuntimeError: weight-bitflip needs a parameter" in line["reason"]
    assert not lines(run, "fault_injected", fault_id)
    check_continues(run, 0, step_of(run))
    assert generation(run) == 0


@pytest.mark.full
def test_a_slow_rank_is_slow(run: Run) -> None:
    number, pids = now_at(run)
    pid = pids[1]
    fault_id = order(run, "slow", rank=1, amount=0.05, for_s=2.0)
    how = str(fired(run, fault_id)["how"])
    if "a cpu cgroup" in how:
        assert f"ftrun-fault-{fault_id}" in Path(f"/proc/{pid}/cgroup").read_text()
        # A second one would be reverted into a cgroup that no longer exists then.
        assert "in the cgroup of an earlier fault" in refused(run, "slow", "--rank", 1)
    else:
        assert "T" in {state(pid) for _ in range(50) if not time.sleep(0.01)}
    used_s, started_s = cpu_s(pid), time.monotonic()
    ended(run, fault_id)
    assert cpu_s(pid) - used_s < 0.2 * (time.monotonic() - started_s) + 0.1
    assert "ftrun-fault" not in Path(f"/proc/{pid}/cgroup").read_text()
    check_continues(run, number, step_of(run))
    assert run.pids() == pids


def test_what_lasts_or_waits_is_taken_back(run: Run) -> None:
    number, pids = now_at(run)
    # Without a cgroup a rank is slowed by signals, to less than one core.
    slow = order(run, "slow", rank=1, amount=0.2, for_s=600.0)
    how = str(fired(run, slow)["how"])
    if how.startswith("a cpu cgroup"):
        assert asked(run, "--cancel", slow, run.run_id).returncode == 0
        ended(run, slow)
        words = ("slow", "--rank", 1, "--amount", 8, "--for", 600, "--json", run.run_id)
        answer = json.loads(asked(run, *words).stdout)
        assert "this does not slow it" in answer["how"]
        assert float(re.findall(r"such as ([\d.]+)", answer["how"])[0]) < 8
        slow = answer["id"]
    assert asked(run, "--cancel", slow, run.run_id).stdout.endswith(": it is taken back\n")
    ended(run, slow)
    assert "ftrun-fault" not in Path(f"/proc/{pids[1]}/cgroup").read_text()

    later = order(run, "segv", rank=0, at_step=step_of(run) + 100_000)
    assert asked(run, "--cancel", later, run.run_id).stdout.endswith(": it will not fire\n")
    assert "neither pending nor active" in refused(run, "--cancel", later, run.run_id)

    hang = order(run, "hang", rank=0)
    fired(run, hang)
    assert asked(run, "--cancel", hang, run.run_id).returncode == 0
    stop = order(run, "stop", rank=1)
    fired(run, stop)
    assert asked(run, "--cancel", stop, run.run_id).returncode == 0
    check_continues(run, number, step_of(run))
    assert run.pids() == pids, "no rank was restarted"
    reasons = [lines(run, "fault_reverted", one)[0]["reason"] for one in (slow, later, hang, stop)]
    assert reasons == ["cancelled"] * 4

    gil = order(run, "gil-hold", rank=0, for_s=4.0)
    fired(run, gil)
    # At once: a command typed by hand might come after its end.
    answer = send(run, InjectFault(make_cancel("cancel", gil)))
    assert isinstance(answer, Refused)
    assert "cannot be taken back" in answer.reason
    assert "it accepts only --node and the run" in refused(run, "--cancel", gil, "--rank", 0)
    ended(run, gil)
    check_continues(run, number, step_of(run))


@pytest.mark.full
def test_input_comes_late(run: Run) -> None:
    number, _ = now_at(run)
    fault_id = order(run, "slow-input", rank=1, for_s=1.0, amount=0.9)
    fired(run, fault_id)
    run.wait_until("late", lambda: "late input rank=1" in run.text)
    assert "late input rank=0" not in run.text
    ended(run, fault_id)
    check_continues(run, number, step_of(run))


@pytest.mark.full
@pytest.mark.parametrize("is_later", [False, True])
def test_out_of_memory_in_a_cgroup_of_its_own(run: Run, is_later: bool) -> None:
    number, pids = now_at(run)
    with held(run) as step:
        when = ("--at-step", step + 10) if is_later else ()
        done = asked(run, "oom", run.run_id, "--rank", 1, "--json", *when)
        is_limited = "ftrun-fault" in Path(f"/proc/{pids[1]}/cgroup").read_text()
    if done.returncode:
        assert "memory cgroup" in done.stderr
        pytest.skip(done.stderr)
    assert is_limited != is_later
    fault_id = json.loads(done.stdout)["id"]
    line = fired(run, fault_id)
    assert line["step"] == step + 10 or not is_later
    run.wait_until("restarted", lambda: generation(run) == number + 1)
    assert "out of memory" in json.dumps(run.journal("workers_exited")[-1:])
    ended(run, fault_id)
    assert not list(Path("/sys/fs/cgroup").rglob(f"ftrun-fault-{fault_id}"))
    check_continues(run, number + 1, 0)


@pytest.mark.full
def test_a_poisoned_batch_ends_the_run(start: Start, script: Script) -> None:
    run = start(*QUICK, "--set", "restart.backoff_initial_s=0.1", script(TRAIN), FOREVER)
    check_continues(run, 0, 0)
    with held(run) as step:
        fault_id = order(run, "poison-batch", rank=0, at_step=step + 10)
    assert run.wait() == 93
    reported = lines(run, "fault_injected", fault_id)
    assert len(reported) == 3
    assert len({line["step"] for line in reported}) == 1


@pytest.mark.full
def test_parts_of_ftrun_are_hit(run: Run) -> None:
    number, pids = now_at(run)
    ups = len(run.journal("smp_ready"))
    smp = run.pid_of("smp")
    fired(run, order(run, "smp-kill"))
    run.wait_until("dead", lambda: is_gone(smp))
    run.wait_until("another SMP", lambda: len(run.journal("smp_ready")) > ups)
    smp = run.pid_of("smp")
    fault_id = order(run, "smp-stop", for_s=1.0)
    fired(run, fault_id)
    run.wait_until("stopped", lambda: state(smp) == "T" or lines(run, "fault_reverted", fault_id))
    ended(run, fault_id)
    run.wait_until("continued", lambda: state(smp) != "T")
    zygote = run.pid_of("zygote")
    fired(run, order(run, "zygote-kill"))
    run.wait_until("dead", lambda: is_gone(zygote))
    agent = run.pid_of("agent")
    fault_id = order(run, "agent-stop", for_s=3.0)
    run.wait_until("stopped", lambda: state(agent) == "T")
    ended(run, fault_id)
    assert run.pids() == pids, "ranks were touched"
    fault_id = order(run, "leader-kill")
    run.wait_until("dead", lambda: is_gone(agent))
    assert lines(run, "fault_injected", fault_id)
    run.wait_until("restarted", lambda: generation(run) == number + 1)
    check_continues(run, number + 1, 0)


@pytest.mark.full
def test_a_snapshot_is_torn(run: Run) -> None:
    number, _ = now_at(run)
    fault_id = order(run, "torn-snapshot", rank=1)
    step = int(str(fired(run, fault_id)["step"]))
    run.wait_until("restarted", lambda: generation(run) == number + 1)
    check_continues(run, number + 1, step)


@pytest.mark.full
def test_snapshot_and_checkpoint_are_damaged(start: Start, script: Script) -> None:
    words = ("--checkpoint-dir", "disk", "--checkpoint-every", "0.5")
    run = start(*QUICK, *words, script(TRAIN), FOREVER)
    check_continues(run, 0, 0)
    run.wait_until("on disk", lambda: run.journal("checkpoint_written"))
    fired(run, order(run, "bitflip-shm", rank=0))
    run.wait_until("rejected", lambda: "does not match; it is rejected" in run.text)
    # The other slot may be half written: then it is the version before, or the checkpoint.
    check_continues(run, 2, 0)
    fired(run, order(run, "corrupt-checkpoint"))


@pytest.mark.full
def test_a_node_freezes_and_is_lost(start: Start, script: Script) -> None:
    run = start(*QUICK, script(TRAIN), FOREVER)
    check_continues(run, 0, 0)
    all_pids = [run.process.pid, run.pid_of("agent"), run.pid_of("smp"), *run.pids()]
    order(run, "freeze", for_s=3.0)
    run.wait_until("frozen", lambda: all(state(pid) == "T" for pid in all_pids))
    run.wait_until("thawed", lambda: all(state(pid) != "T" for pid in all_pids))
    check_continues(run, 0, step_of(run))
    fired(run, order(run, "cpu-starve", for_s=1000.0, amount=1.0))
    (reverter,) = reverters(run.pid_of("agent"))
    burners = Path(f"/proc/{reverter}/task/{reverter}/children").read_text().split()
    all_pids += [reverter, *map(int, burners)]
    order(run, "node-loss")
    assert run.process.wait(WAIT_S) == -signal.SIGKILL
    give_up = time.monotonic() + WAIT_S
    while not all(is_gone(pid) for pid in all_pids[1:]) or reverters_of(run.process.pid):
        assert time.monotonic() < give_up
        time.sleep(0.02)
    assert run.journal("fault_injected")[-1]["fault"] == "node-loss"
    # The next start of a run would remove it.
    for path in run_folder(RunId(run.run_id)).path.iterdir():
        path.unlink()
    run_folder(RunId(run.run_id)).path.rmdir()


@pytest.mark.full
def test_resources_are_short(run: Run) -> None:
    number, _ = now_at(run)
    agent = run.pid_of("agent")
    before = resource.prlimit(agent, resource.RLIMIT_NOFILE)
    fault_id = order(run, "fd-limit", for_s=3.0)
    assert resource.prlimit(agent, resource.RLIMIT_NOFILE)[0] < before[0]
    assert status(run)["ranks"], "a request in that time is answered afterwards at the latest"
    ended(run, fault_id)
    assert resource.prlimit(agent, resource.RLIMIT_NOFILE) == before
    fault_id = order(run, "cpu-starve", for_s=3.0, amount=1.0)
    reverter = reverters(agent)[0]
    burners = Path(f"/proc/{reverter}/task/{reverter}/children").read_text().split()
    assert len(burners) == len(os.sched_getaffinity(agent))
    ended(run, fault_id)
    assert all(is_gone(int(pid)) for pid in burners)
    done = asked(run, "pid-limit", run.run_id, "--for", "5s", "--json")
    if done.returncode == 0:
        fault_id = json.loads(done.stdout)["id"]
        assert f"ftrun-fault-{fault_id}" in Path(f"/proc/{agent}/cgroup").read_text()
        ended(run, fault_id)
        assert "ftrun-fault" not in Path(f"/proc/{agent}/cgroup").read_text()
    else:
        assert "pids cgroup" in done.stderr
    check_continues(run, number, step_of(run))


def reverters_of(stub: int) -> list[str]:
    """The processes that revert and have this process in their order."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode()
            if "ftrun.agent.faults.reverter_process" in words and f", {stub}]" in words:
                found.append(entry.name)
    return found


def reverters(agent: int) -> list[int]:
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    names = {int(pid): Path(f"/proc/{pid}/comm").read_text().strip() for pid in children}
    return [pid for pid, name in names.items() if name == "ftrun-healer"]


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")
def test_the_disk_is_full(start: Start, script: Script, tmp_path: Path) -> None:
    small = tmp_path / "ftrun-logs"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", small], check=True)
    try:
        run = start(*QUICK, script(TRAIN), FOREVER)
        check_continues(run, 0, 0)
        fault_id = order(run, "disk-full", for_s=1.0)
        assert os.statvfs(small).f_bavail == 0
        run.wait_until("healed", lambda: os.statvfs(small).f_bavail > 0)
        ended(run, fault_id)
        check_continues(run, 0, step_of(run))
        run.end()
    finally:
        subprocess.run(["umount", "--lazy", small], check=True)


def test_a_run_that_does_not_allow_faults_refuses_them(start: Start, script: Script) -> None:
    run = start("--nproc-per-node", "1", script(TRAIN), FOREVER)
    check_continues(run, 0, 0)
    assert "--allow-faults" in refused(run, "rank-kill", run.run_id, "--rank", 0)
    check_continues(run, 0, step_of(run))


def test_what_cannot_be_made_is_refused_with_what_is_missing(run: Run) -> None:
    name, before = run.run_id, len(run.journal("fault_injected"))
    assert "Did you mean rank-kill?" in refused(run, "rank-kil", name)
    assert "which rank?" in refused(run, "segv", name)
    assert "no rank 7" in refused(run, "segv", name, "--rank", 7)
    assert "not --node" in refused(run, "segv", name, "--node", 0)
    assert "no node 'x'" in refused(run, "smp-kill", name, "--node", "x")
    assert "has done step" in refused(run, "segv", name, "--rank", 0, "--at-step", 1)
    assert "one node" in refused(run, "partition", name)
    assert "one node" in refused(run, "bitflip-wire", name)
    assert "libfaketime" in refused(run, "clock-jump", name)
    assert "--checkpoint-dir" in refused(run, "corrupt-checkpoint", name)
    assert "versions of other nodes" in refused(run, "fragment-stale", name)
    assert len(run.journal("fault_injected")) == before
