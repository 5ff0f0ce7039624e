"""Ranks that stay while others fail change no bit, whatever fails while they do."""

import os
import signal
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.chaos.conftest import STEPS as SHARED_STEPS
from tests.chaos.conftest import TRAIN as SHARED_TRAIN
from tests.chaos.conftest import Checked
from tests.integration.conftest import Run

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 60
TRAIN = """
import hashlib, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn

import ftrun

steps, kind, kills = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 200), nn.Dropout(0.1), nn.BatchNorm1d(200), nn.Linear(200, 8))
torch.manual_seed(1 + rank)
if kind == "ddp":
    trained = nn.parallel.DistributedDataParallel(model)
else:
    from torch.distributed.fsdp import fully_shard
    model = model[:2] + model[3:]
    fully_shard(model[0]); fully_shard(model)
    trained = model
optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
session = ftrun.attach(model=trained, optimizer=optimizer)
losses = open(f"losses.{rank}", "a", buffering=1)

def fails(step, place):
    # RANK:STEP:PLACE, once in a run
    name = f"{rank}:{step}:{place}"
    if name in kills and not Path(name).exists():
        Path(name).touch()
        if place == "hang":
            time.sleep(600)
        os.kill(os.getpid(), 9)

for step in session.steps(steps):
    fails(step, "between")
    with session.guard():
        x = torch.randn(16, 32)
        optimizer.zero_grad()
        loss = trained(x).pow(2).mean()
        fails(step, "forward")
        fails(step, "hang")
        loss.backward()
        fails(step, "backward")
        optimizer.step()
        time.sleep(0.01)
        while step == steps - 10 and Path("hold").exists():
            time.sleep(0.01)
        losses.write(f"{step} {loss.item().hex()}\\n")
digest = hashlib.sha256()
for value in trained.state_dict().values():
    local = value.to_local() if hasattr(value, "to_local") else value
    digest.update(local.detach().numpy().tobytes())
print(f"digest {rank} {digest.hexdigest()}\\n", end="", flush=True)
dist.destroy_process_group()
"""


def begin(
    folder: Path,
    num_ranks: int,
    kind: str,
    *kills: str,
    flags: Sequence[str] = (),
    env: dict[str, str] | None = None,
    script: str = TRAIN,
) -> Run:
    (folder / "train.py").write_text(script)
    words = ["--survivors", "on", "--nproc-per-node", str(num_ranks), *flags]
    return Run(folder, *words, "train.py", str(STEPS), kind, *kills, env=env)


def result(run: Run, num_ranks: int) -> tuple[list[str], list[set[str]]]:
    """The digests, and the losses of each rank: a repeated step has the same loss again."""
    digests = sorted({line for line in run.text.splitlines() if line.startswith("digest")})
    files = [run.folder / f"losses.{rank}" for rank in range(num_ranks)]
    return digests, [set(file.read_text().splitlines()) for file in files]


Expected = Callable[[int, str], tuple[list[str], list[set[str]]]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    known: dict[tuple[int, str], tuple[list[str], list[set[str]]]] = {}

    def of(num_ranks: int, kind: str) -> tuple[list[str], list[set[str]]]:
        if (num_ranks, kind) not in known:
            run = begin(tmp_path_factory.mktemp(f"{kind}{num_ranks}"), num_ranks, kind)
            try:
                assert run.wait() == 0, run.text
                known[num_ranks, kind] = result(run, num_ranks)
            finally:
                run.end()
        return known[num_ranks, kind]

    return of


KILL_RANK = """\
        if step == 25 and rank == 1 and session.generation == 0:
            os.kill(os.getpid(), 9)
"""


def guarded(script: str) -> str:
    """The training of all chaos tests, with the body of its loop in a guard and a kill in it."""
    head = "for step in session.steps(steps):\n"
    before, _, rest = script.partition(head)
    body, _, after = rest.partition("digest = ")
    body = textwrap.indent(body, "    ")
    step = "        optimizer.step()\n"
    body = body.replace(step, KILL_RANK + step)
    return f"{before}{head}    with session.guard():\n{body}digest = {after}"


def test_a_rank_stays_while_the_other_one_is_replaced(tmp_path: Path, undisturbed: Checked) -> None:
    (tmp_path / "train.py").write_text(guarded(SHARED_TRAIN))
    words = ("--survivors", "on", "--nproc-per-node", "2", "train.py", str(SHARED_STEPS), "0.01")
    run = Run(tmp_path, *words)
    try:
        assert run.wait() == 0, run.text
        first, second = run.journal("generation_started")
        assert (second["staying"], second["pids"][0]) == ([0], first["pids"][0])  # type: ignore[index]
        undisturbed.check(run)
    finally:
        run.end()


def staying(run: Run) -> list[list[int]]:
    """The ranks that stay, of each generation after the first."""
    return [list(line["staying"]) for line in run.journal("generation_started")[1:]]  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("num_ranks", "kind", "kills", "stay"),
    [
        *(
            pytest.param(*given, marks=pytest.mark.full)
            for given in [
                (3, "ddp", ["1:20:backward"], [[0, 2]]),
                (2, "ddp", ["1:20:forward", "0:40:backward"], [[0], [1]]),
                (2, "fsdp2", ["0:20:backward", "1:40:forward"], [[1], [0]]),
                (3, "ddp", ["1:20:forward", "2:20:forward"], [[0]]),
                (3, "ddp", ["1:20:backward", "2:20:forward"], [[0, 1], []]),
                (3, "ddp", ["0:20:between"], [[1, 2]]),
                (2, "ddp", ["0:0:backward"], [[]]),
                (2, "ddp", ["0:20:forward", "1:20:forward"], [[]]),
            ]
        ),
    ],
)
def test_ranks_stay_and_the_result_is_the_same(
    num_ranks: int,
    kind: str,
    kills: list[str],
    stay: list[list[int]],
    tmp_path: Path,
    expected: Expected,
) -> None:
    run = begin(tmp_path, num_ranks, kind, *kills)
    try:
        assert run.wait() == 0, run.text
        assert staying(run) == stay, run.text
        assert result(run, num_ranks) == expected(num_ranks, kind)
    finally:
        run.end()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_survivor_that_ends_or_stops_while_it_is_renewed_costs_one_more_restart(
    number: int, tmp_path: Path, expected: Expected
) -> None:
    """A generation that begins with survivors gets one attempt; all ranks start again after it."""
    run = begin(tmp_path, 3, "ddp", "1:20:backward")
    try:
        run.wait_until("ranks are parked", lambda: run.journal("ranks_parked"))
        os.kill(run.journal("generation_started")[0]["pids"][0], number)  # type: ignore[index]
        assert run.wait() == 0, run.text
        assert staying(run) in ([[0, 2], []], [[0, 2]]), run.text
        assert result(run, 3) == expected(3, "ddp")
    finally:
        run.end()


SETS_UP_ONCE = """\
if not Path("prepared").exists():
    dist.barrier()
    Path("prepared").touch()
torch.manual_seed(0)
"""


@pytest.mark.full
def test_a_script_whose_set_up_differs_costs_one_restart_that_is_not_counted(
    tmp_path: Path, expected: Expected
) -> None:
    script = TRAIN.replace("torch.manual_seed(0)\n", SETS_UP_ONCE)
    kills = ("1:20:forward", "1:40:forward")
    run = begin(tmp_path, 2, "ddp", *kills, flags=["--set", "restart.budget=2"], script=script)
    try:
        assert run.wait() == 0, run.text
        assert staying(run) == [[0], [], []], run.text
        assert run.text.count("--survivors has no effect in the rest of this run") == 1
        assert result(run, 2) == expected(2, "ddp")
    finally:
        run.end()


HANGS_SOON = [
    *("--set", "hang.suspect_after_s=2", "--set", "hang.no_activity_s=1"),
    *("--set", "restart.park_s=8"),
]


@pytest.mark.full
def test_a_rank_that_hangs_is_named_and_killed_also_after_a_renewal(
    tmp_path: Path, expected: Expected
) -> None:
    run = begin(tmp_path, 3, "ddp", "1:20:backward", "0:40:hang", flags=HANGS_SOON)
    try:
        assert run.wait() == 0, run.text
        assert staying(run) == [[0, 2], [1, 2]], run.text
        hang = run.journal("verdict")[-1]
        assert hang["verdict"]["culprits"] == [0], hang  # type: ignore[index]
        _, parked = run.journal("ranks_parked")
        assert parked["notes"] == [], "the culprit is not asked to park"
        assert result(run, 3) == expected(3, "ddp")
    finally:
        run.end()


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "stay"),
    [
        (["--set", "restart.max_renewals=1"], [[0], []]),
        (["--start", "fresh"], [[0], [0]]),
        (["--set", "monitor.enabled=false"], [[0], [0]]),
        (["--no-snapshots"], [[], []]),
    ],
    ids=lambda value: value[-1] if isinstance(value[-1], str) else "",
)
def test_settings_decide_whether_ranks_stay(
    flags: list[str], stay: list[list[int]], tmp_path: Path, expected: Expected
) -> None:
    run = begin(tmp_path, 2, "ddp", "1:20:backward", "1:40:backward", flags=flags)
    try:
        assert run.wait() == 0, run.text
        assert staying(run) == stay, run.text
        assert result(run, 2) == expected(2, "ddp")
    finally:
        run.end()


POINTS = [f"agent.renew.{place}" for place in ("revoked", "parked", "planned", "started")]


@pytest.mark.full
@pytest.mark.parametrize("point", POINTS)
def test_an_agent_that_ends_while_ranks_are_renewed_changes_no_bit(
    point: str, tmp_path: Path, expected: Expected
) -> None:
    once = tmp_path / "once"
    variables = {"FTRUN_CRASH_AT": point, "FTRUN_CRASH_ONCE": str(once)}
    run = begin(tmp_path, 2, "ddp", "1:20:backward", env=variables)
    try:
        assert run.wait() == 0, run.text
        assert once.exists()
        assert result(run, 2) == expected(2, "ddp")
    finally:
        run.end()
