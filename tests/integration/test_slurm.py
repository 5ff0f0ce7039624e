"""ftrun inside a real Slurm: a step of several nodes is one run, with nothing but `srun ftrun`.

Slurm runs over a virtual cluster (`scripts/virtual_slurm.py`), so that nodes have names, addresses
and processes of their own, and can be powered off.
"""

import json
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual_node import processes_of
from virtual_slurm import VirtualSlurm, available

if reason := available():
    pytest.skip(f"needs Slurm: {reason}", allow_module_level=True)

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "integration" / "scripts" / "ranks_on_nodes.py"
PAGE = ROOT / "docs" / "many-nodes.md"
WAIT_S = 600.0
ONE_TASK_EACH = ("-N3", "--ntasks-per-node=1")
SURVIVES = ("--no-kill", "--kill-on-bad-exit=0")
OURS = ("smp_exited", "zygote_exited", "memory_adopted")

ATTACHED = """
import json, os, sys, time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ftrun

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
session = ftrun.attach(model=model, optimizer=optimizer)
notes = open(folder / f"rank{dist.get_rank()}.jsonl", "a", 1)

def note(kind, **fields):
    fields |= {"generation": session.generation, "given": dict(os.environ)}
    print(json.dumps({"kind": kind, "step": session.step, **fields}), file=notes)

note("begun", restored=session.restored)
for step in session.steps(10_000):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    note("step")
    may_end = torch.tensor([float((folder / "go").exists())])
    dist.all_reduce(may_end, op=dist.ReduceOp.MIN)
    if may_end.item():
        break
    time.sleep(0.02)
"""


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file; the last line may be half written, or never be finished."""
    whole, _, _ = (path.read_text() if path.exists() else "").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


class Step:
    """One job of a user; all nodes share the home and the folder."""

    def __init__(self, slurm: VirtualSlurm, folder: Path) -> None:
        self.slurm = slurm
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir()
        self.output = folder / "output"
        own = ("FTRUN_", "PET_", "SLURM_")
        self.variables = {k: v for k, v in os.environ.items() if not k.startswith(own)}
        # The command of this python: the only file that a user needs on the nodes.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        more = {"HOME": str(self.home), "PATH": path, "OMP_NUM_THREADS": "1"}
        self.variables |= {**more, "PYTHONUNBUFFERED": "1"}
        self.process: subprocess.Popen[bytes] | None = None

    def srun(self, *words: object) -> None:
        self.start("srun", *words)

    def start(self, *words: object) -> None:
        with self.output.open("ab") as output:
            self.process = self.slurm.run(
                words,
                env=self.variables,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def code(self) -> int:
        """Exit code of the started process."""
        assert self.process is not None
        try:
            return self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {WAIT_S} s:\n{self.text}\n{self.slurm.log()}")

    def cancel(self, signal: str) -> None:
        """Cancel as users do: it reaches every process of the step."""
        self.slurm.ask("scancel", f"--signal={signal}", f"{self.job_id}.0")

    @property
    def job_id(self) -> str:
        return self.slurm.ask("squeue", "--noheader", "--format=%i")

    @property
    def text(self) -> str:
        files = [self.output, *sorted(self.folder.glob("*.out"))]
        return "\n".join(path.read_text(errors="replace") for path in files if path.exists())

    def notes(self, rank: int, kind: str = "") -> list[dict[str, Any]]:
        lines = whole_lines(self.folder / f"rank{rank}.jsonl")
        return [note for note in lines if not kind or note["kind"] == kind]

    def journal(self, *kinds: str) -> list[dict[str, Any]]:
        """Of all nodes."""
        paths = (self.folder / "ftrun-logs").glob("*/node*/journal.jsonl")
        lines = [line for path in paths for line in whole_lines(path)]
        return [line for line in lines if not kinds or line["kind"] in kinds]

    def wait_until(self, what: str, is_so: Callable[[], object]) -> None:
        give_up_s = time.monotonic() + WAIT_S
        while not is_so():
            ended = self.process is not None and self.process.poll()
            assert not ended, f"ended with {ended}, not {what}:\n{self.text}"
            assert time.monotonic() < give_up_s, f"not {what}:\n{self.text}\n{self.slurm.log()}"
            time.sleep(0.1)

    def wait_for_steps(self, count: int, *, generation: int = 0, ranks: int = 2) -> None:
        def made(rank: int) -> int:
            return sum(note["generation"] == generation for note in self.notes(rank, "step"))

        what = f"{count} steps of generation {generation}"
        self.wait_until(what, lambda: all(made(rank) >= count for rank in range(ranks)))

    def let_end(self) -> None:
        (self.folder / "go").touch()

    def clean_up(self) -> None:
        """No job of the test is left in Slurm, and every node is up."""
        self.slurm.ask("scancel", "--quiet", "--user=root")
        for name in self.slurm.names:
            if not self.slurm.cluster.nodes()[int(name.removeprefix("node"))].is_alive:
                self.slurm.revive(name)
        self.slurm.wait_until_idle(*self.slurm.names)
        if self.process is not None:
            self.process.wait(WAIT_S)


@pytest.fixture(scope="module")
def slurm() -> Iterator[VirtualSlurm]:
    with VirtualSlurm(3) as made:
        yield made


@pytest.fixture
def step(slurm: VirtualSlurm, tmp_path: Path) -> Iterator[Step]:
    made = Step(slurm, tmp_path)
    yield made
    made.clean_up()


def ftrun(step: Step, *more: object) -> list[object]:
    """Two nodes that train, one spare."""
    return ["ftrun", "--spares", 1, "--nproc-per-node", 1, *more, SCRIPT, step.folder, 0]


def codes_of_tasks(step: Step) -> dict[str, int]:
    """By node, as srun reports them; a task that has exited with 0 is not listed."""
    found = re.findall(r"srun: error: (\w+): task \d+: Exited with exit code (\d+)", step.text)
    return {node: int(code) for node, code in found}


def test_a_step_is_one_run_with_a_spare_and_a_secret_of_its_own(step: Step) -> None:
    step.srun(*ONE_TASK_EACH, *ftrun(step))
    step.wait_for_steps(5)
    started = [step.notes(rank, "begun")[0] for rank in range(2)]
    assert [note["node"] for note in started] == ["node1", "node2"]
    run_id = f"ranks_on_nodes-job{step.job_id}-0"
    expected = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": run_id}
    for rank, note in enumerate(started):
        assert {**expected, "RANK": str(rank)}.items() <= note["given"].items()

    (secret,) = (step.home / ".ftrun" / "secrets").iterdir()
    assert secret.name == f"virtual-{step.job_id}-0.secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert "UNAUTHENTICATED" not in step.text

    said = step.slurm.cluster.run(
        "node3",  # the spare
        ["ftrun", "status", run_id, "--json"],
        env=step.variables,
        stdout=subprocess.PIPE,
    )
    document = json.loads(said.communicate(timeout=WAIT_S)[0])
    roles = {node["node_id"]: node["role"] for node in document["cluster"]["nodes"]}
    assert roles == {"node1": "member", "node2": "member", "node3": "spare"}
    assert document["authenticated"] is True

    step.let_end()
    assert step.code() == 0
    assert not list(secret.parent.iterdir())


@pytest.mark.parametrize("lost", ["node2", "node1"], ids=["a member", "the first node"])
def test_a_node_is_switched_off_and_the_step_ends_well(step: Step, lost: str) -> None:
    step.srun(*ONE_TASK_EACH, *SURVIVES, *ftrun(step))
    step.wait_for_steps(5)
    step.slurm.kill(lost)
    step.wait_for_steps(5, generation=1)
    step.slurm.wait_until_down(lost)  # and then not to stop the step
    before = len(step.notes(0, "step"))
    step.wait_until("more steps", lambda: len(step.notes(0, "step")) > before + 20)
    nodes = {step.notes(rank, "begun")[-1]["node"] for rank in range(2)}
    assert nodes == {"node1", "node2", "node3"} - {lost}
    step.let_end()
    assert step.code() == 0


@pytest.mark.parametrize(("signal", "code"), [("TERM", 143), ("USR1", 138)])
def test_a_signal_to_every_process_stops_it_alike_on_every_node(
    step: Step, signal: str, code: int
) -> None:
    step.srun(*ONE_TASK_EACH, *ftrun(step))
    step.wait_for_steps(5)
    step.cancel(signal)
    assert step.code() == code
    assert codes_of_tasks(step) == {"node1": code, "node2": code, "node3": code}
    assert step.journal(*OURS, "generation_started") == step.journal("generation_started")
    asked = [line["node"] for line in step.journal("stop_requested")]
    assert sorted(asked) == sorted(set(asked))  # not twice, by Slurm and by the stub
    assert not step.journal("workers_killed")


def test_a_signal_that_is_for_the_script_costs_nothing(step: Step) -> None:
    step.srun(*ONE_TASK_EACH, *ftrun(step))
    step.wait_for_steps(5)
    step.cancel("USR2")
    step.wait_until("passed on", lambda: len(step.journal("signal_forwarded")) >= 3)
    step.let_end()
    assert step.code() == 0
    assert not step.journal(*OURS, "workers_exited", "workers_killed")[2:]  # two ranks finished


def test_a_failing_script_gives_its_code_on_every_node(step: Step) -> None:
    script = step.folder / "fails.py"
    script.write_text(
        "import os, sys, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "sys.exit(7 if os.environ['RANK'] == '1' else 0)\n"
    )
    step.srun(*ONE_TASK_EACH, "ftrun", "--spares", 1, script)
    assert step.code() == 7
    assert codes_of_tasks(step) == {"node1": 7, "node2": 7, "node3": 7}


def test_several_tasks_on_a_node_are_runs_of_their_own(step: Step) -> None:
    script = step.folder / "alone.py"
    script.write_text("import os\nassert os.environ['WORLD_SIZE'] == '1'\n")
    step.srun("-N2", "-n3", "ftrun", script)
    assert step.code() == 0
    assert len(list((step.folder / "ftrun-logs").glob("alone-*"))) == 3


def test_several_tasks_on_a_node_are_refused_with_what_is_missing(step: Step) -> None:
    step.srun("-N2", "-n4", "ftrun", "--nnodes", 2, SCRIPT, step.folder, 1)
    assert step.code() == 2
    assert step.text.count("srun --ntasks-per-node=1") == 4


# --- the job script of the pages ------------------------------------------------------------------


def job_script(step: Step, script: Path) -> Path:
    """The script of docs/many-nodes.md, except its sizes, folders and the training script."""
    text = next(
        block
        for block in re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        if "#SBATCH --nodes" in block
    )
    for there, here in (
        ("--nodes=5", "--nodes=3"),
        ("--nproc-per-node 8", "--nproc-per-node 1"),
        ("/shared/checkpoints", step.folder / "checkpoints"),
        (" train.py", f" {script} {step.folder} 0"),
    ):
        assert text.count(there) == 1, there
        text = text.replace(there, str(here))
    path = step.folder / "job.sh"
    path.write_text(text)
    return path


def submit(step: Step, script: Path) -> None:
    step.start("sbatch", job_script(step, script))
    assert step.code() == 0, step.text


def job_state(step: Step) -> str:
    return step.slurm.ask("squeue", "--noheader", "--format=%T")


def test_a_job_outlives_the_node_of_its_batch_script(step: Step) -> None:
    submit(step, SCRIPT)
    step.wait_for_steps(5)
    step.slurm.kill("node1")
    step.slurm.wait_until_down("node1")
    step.wait_for_steps(50, generation=1)
    step.let_end()
    step.wait_until("the end", lambda: len(step.journal("run_ended")) == 2)
    assert {line["exit_code"] for line in step.journal("run_ended")} == {0}
    # With the batch script lost, no process reports the end of the job to Slurm: the page says so.
    assert job_state(step) == "RUNNING"


def test_a_job_that_is_out_of_time_continues_from_its_checkpoint(step: Step) -> None:
    script = step.folder / "attached.py"
    script.write_text(ATTACHED)
    submit(step, script)
    step.wait_for_steps(20)
    job_id = step.job_id
    step.slurm.ask("scancel", "--signal=USR1", job_id)  # as #SBATCH --signal=USR1@300
    step.wait_until("again in the queue", lambda: job_state(step) == "PENDING")
    last = max(note["step"] for note in step.notes(0))
    step.wait_until("begun again", lambda: len(step.notes(1, "begun")) == 2)
    again = step.notes(1, "begun")[1]
    given = again["given"]
    assert (given["SLURM_JOB_ID"], given["SLURM_RESTART_COUNT"]) == (job_id, "1")
    assert again["restored"] is True
    assert last <= again["step"] <= last + 1
    step.let_end()
    step.wait_until("done", lambda: not job_state(step))
    assert "JobState=COMPLETED" in step.slurm.ask("scontrol", "show", "job", job_id)


# --- what `ftrun manifest slurm` writes ---------------------------------------------------------


def rendered(step: Step, options: list[object], words: list[object]) -> Path:
    command = [sys.executable, "-m", "ftrun", "manifest", "slurm", *options, "--", *words]
    done = subprocess.run(
        [str(word) for word in command],
        cwd=step.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    path = step.folder / "rendered.sh"
    path.write_text(done.stdout)
    return path


@pytest.mark.parametrize(
    ("options", "nodes"),
    [
        ([], ["--nnodes", 2, "--spares", 1]),
        (["--cpus", 2, "--memory", "500Mi", "--time", "2h"], ["--nnodes", "1:3"]),
        (["--partition", "main", "--sbatch", "--nice=5", "--name", "a.b_c-1"], []),
    ],
)
def test_sbatch_takes_what_is_rendered(
    step: Step, options: list[object], nodes: list[object]
) -> None:
    path = rendered(step, options, [*nodes, "train.py", "a b", "$HOME"])
    assert re.search(r"Job \d+ to start at", step.slurm.ask("sbatch", "--test-only", path))


def test_a_rendered_job_loses_a_node_and_its_time_and_continues(step: Step) -> None:
    script = step.folder / "attached.py"
    script.write_text(ATTACHED)
    directory = step.folder / "checkpoints"
    words = ["--nnodes", 2, "--spares", 1, "--checkpoint-dir", directory, script, step.folder]
    path = rendered(step, ["--cpus", 2, "--memory", "500Mi", "--time", "2h"], words)
    step.start("sbatch", path)
    assert step.code() == 0, step.text
    step.wait_for_steps(20)
    job_id = step.job_id
    step.slurm.kill("node2")
    step.wait_for_steps(20, generation=1)
    # If a node returns before Slurm has marked it as down, srun kills the others.
    step.wait_until("missed", lambda: "down" in step.slurm.ask("sinfo", "-hn", "node2", "-o%t"))
    step.slurm.revive("node2")
    step.slurm.ask("scancel", "--signal=USR1", job_id)
    step.wait_until("again in the queue", lambda: job_state(step) == "PENDING")
    last = max(note["step"] for note in step.notes(0))

    def lives() -> set[str]:
        given = [note["given"] for rank in range(2) for note in step.notes(rank, "begun")]
        return {one.get("SLURM_RESTART_COUNT", "0") for one in given}

    step.wait_until("begun again", lambda: lives() == {"0", "1"})
    step.wait_until("ranks", lambda: len(step.notes(1, "begun")) >= 3)
    again = step.notes(1, "begun")[-1]
    assert again["given"]["TORCHELASTIC_RUN_ID"] == f"attached-{job_id}"
    assert again["restored"] is True
    assert last <= again["step"] <= last + 1
    step.let_end()
    step.wait_until("done", lambda: not job_state(step))
    assert "JobState=COMPLETED" in step.slurm.ask("scontrol", "show", "job", job_id)
    assert not list((step.home / ".ftrun" / "secrets").iterdir())


def test_no_process_is_left_on_a_node(step: Step) -> None:
    step.srun(*ONE_TASK_EACH, *ftrun(step))
    step.wait_for_steps(5)
    step.let_end()
    assert step.code() == 0
    for name in step.slurm.names:
        init = step.slurm.cluster.nodes()[int(name.removeprefix("node"))].init
        assert init is not None
        names = [Path(f"/proc/{one.pid}/comm").read_text().strip() for one in processes_of(init)]
        assert [one for one in names if not one.startswith("slurm")] == []
