"""The output of `ftrun manifest` runs unchanged, as far as one machine allows it.

The batch script runs under bash. Two small programs replace Slurm's: they set the variables that
Slurm sets, once for each node. tests/integration/test_slurm.py uses a real Slurm.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.conftest import free_port, in_full

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPTS = Path(__file__).parent / "scripts"
WAIT_S = 600.0
JOB_ID = 4711
RUN_ID = f"queued-{JOB_ID}"
NODES = ("one", "two")

SRUN = """#!/bin/bash
# What srun does that a task can see: each node's variables, the worst code at the end.
while [[ $1 == -* ]]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2
export SLURM_STEP_NODELIST=127.0.0.[1-2] SLURM_CLUSTER_NAME=none
worst=0
for node in one two; do
    SLURMD_NODENAME=$node "$@" > "$FOLDER/$node.$((SLURM_RESTART_COUNT + 0)).out" 2>&1 &
    echo $! > "$FOLDER/$node.pid"
done
for pid in $(cat "$FOLDER"/{one,two}.pid); do
    wait $pid; code=$?
    ((code > worst)) && worst=$code
done
exit $worst
"""
SCONTROL = """#!/bin/bash
echo "$*" >> "$FOLDER/scontrol"
"""


def rendered(*words: object, folder: Path) -> str:
    command = [sys.executable, "-m", "ftrun", "manifest", *map(str, words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def plain_variables() -> dict[str, str]:
    own = ("FTRUN_", "PET_", "SLURM_")
    return {key: value for key, value in os.environ.items() if not key.startswith(own)}


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file; the last line may be half written, or never be finished."""
    whole, _, _ = (path.read_text() if path.exists() else "").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


@pytest.fixture
def short() -> Iterator[Path]:
    """A path that is short enough for the names of sockets."""
    with tempfile.TemporaryDirectory(prefix="ftrun-m-") as folder:
        yield Path(folder)


# --- Slurm: two lives of one job ------------------------------------------------------------------


class Job:
    """The rendered batch script, started again for each life of the job."""

    def __init__(self, folder: Path, short: Path) -> None:
        self.folder = folder
        self.home = short / "home"
        programs = short / "bin"
        for path in (self.home, programs, short / "run"):
            path.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        shutil.copy2(SCRIPTS / "queued_training.py", folder / "queued.py")
        flags = ["--nnodes", 2, "--checkpoint-every", 1, "--checkpoint-dir", folder / "checkpoints"]
        text = rendered("slurm", "--", *flags, "queued.py", folder, folder=folder)
        (folder / "job.sh").write_text(text)
        path = [programs, Path(sys.executable).parent, *os.environ["PATH"].split(os.pathsep)]
        self.variables = plain_variables() | {
            "PATH": os.pathsep.join(map(str, path)),
            "HOME": str(self.home),
            "XDG_RUNTIME_DIR": str(short / "run"),
            "FOLDER": str(folder),
            "SLURM_JOB_ID": str(JOB_ID),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, life: int) -> None:
        more = {"SLURM_RESTART_COUNT": str(life)} if life else {}
        command = ["bash", "job.sh"]
        self.process = subprocess.Popen(command, cwd=self.folder, env=self.variables | more)

    def code(self) -> int:
        assert self.process is not None
        try:
            return self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {WAIT_S} s:\n{self.text}")

    def signal(self, number: signal.Signals, *nodes: str) -> None:
        for node in nodes or NODES:
            os.kill(int((self.folder / f"{node}.pid").read_text()), number)

    @property
    def text(self) -> str:
        files = sorted(self.folder.glob("*.out"))
        return "\n".join(f"{path.name}:\n{path.read_text(errors='replace')}" for path in files)

    @property
    def secrets(self) -> list[str]:
        return sorted(path.name for path in self.home.glob(".ftrun/secrets/*"))

    def notes(self, rank: int, kind: str, life: int) -> list[dict[str, Any]]:
        found = whole_lines(self.folder / f"rank{rank}.jsonl")
        return [note for note in found if (note["kind"], note["life"]) == (kind, life)]

    def wait_for_steps(self, count: int, life: int) -> None:
        self.wait_until(
            f"{count} steps of life {life}",
            lambda: all(len(self.notes(rank, "step", life)) >= count for rank in range(2)),
        )

    def wait_until(self, what: str, is_so: Callable[[], object]) -> None:
        assert self.process is not None
        give_up_s = time.monotonic() + WAIT_S
        while not is_so():
            assert self.process.poll() is None, f"ended, not {what}:\n{self.text}"
            assert time.monotonic() < give_up_s, f"not {what}:\n{self.text}"
            time.sleep(0.05)

    def journal(self, kind: str, node: str) -> list[dict[str, Any]]:
        path = self.folder / "ftrun-logs" / RUN_ID / node / "journal.jsonl"
        return [line for line in whole_lines(path) if line["kind"] == kind]

    def memories(self) -> dict[str, int]:
        """Pid of each node's SMP."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().decode().split("\0")
                if entry.name.isdigit() and "ftrun.smp" in line and RUN_ID in line:
                    path = next(word for word in line if word.endswith(".sock"))
                    found[Path(path).parent.name.rpartition("@")[2]] = int(entry.name)
        return found

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(OSError):
                self.signal(signal.SIGKILL)
            self.process.wait(WAIT_S)
        for pid in self.memories().values():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def job(tmp_path: Path, short: Path) -> Iterator[Job]:
    made = Job(tmp_path, short)
    yield made
    made.end()


@pytest.mark.full
def test_a_job_that_is_queued_again_continues_from_its_checkpoint(job: Job) -> None:
    job.start(0)
    job.wait_for_steps(20, life=0)
    assert job.secrets == [f"none-{JOB_ID}-0.secret"]
    job.signal(signal.SIGUSR1)  # as #SBATCH --signal=USR1@130, to all
    assert job.code() == 138, job.text
    assert (job.folder / "scontrol").read_text() == f"requeue {JOB_ID}\n"
    assert job.secrets == []
    last = max(note["step"] for note in job.notes(0, "step", life=0))

    job.start(1)
    job.wait_for_steps(5, life=1)
    for rank in range(2):
        (started,) = job.notes(rank, "begun", life=1)
        assert started["restored"] is True
        assert last <= started["step"] <= last + 1
        assert started["given"]["TORCHELASTIC_RUN_ID"] == RUN_ID
    assert job.secrets == [f"none-{JOB_ID}-0-r1.secret"]
    (job.folder / "go").touch()
    assert job.code() == 0, job.text
    assert (job.folder / "scontrol").read_text() == f"requeue {JOB_ID}\n"
    for node in NODES:  # one run, one journal, two launches
        assert len(job.journal("run_started", node)) == 2


@pytest.mark.full
@pytest.mark.parametrize("left", [(), ("one",), ("two",), NODES], ids=["no", "one", "two", "both"])
def test_a_job_that_was_killed_continues_whatever_it_has_left(
    job: Job, left: tuple[str, ...]
) -> None:
    """A secret, run folders, locks, journals; and the memory of some of its nodes."""
    job.start(0)
    job.wait_until("a checkpoint", lambda: (job.folder / "checkpoints" / "latest").exists())
    job.wait_for_steps(150, life=0)
    memories = job.memories()
    assert set(memories) == set(NODES)
    job.signal(signal.SIGKILL)
    for node, pid in memories.items():
        if node not in left:
            os.kill(pid, signal.SIGKILL)
    assert job.code() == 137
    assert not (job.folder / "scontrol").exists()
    assert job.secrets == [f"none-{JOB_ID}-0.secret"]
    first = {note["step"]: note["loss"] for note in job.notes(0, "step", life=0)}

    job.start(1)
    job.wait_for_steps(5, life=1)
    assert job.secrets == [f"none-{JOB_ID}-0-r1.secret"]
    started = [job.notes(rank, "begun", life=1)[0] for rank in range(2)]
    assert [note["restored"] for note in started] == [True, True]
    assert 0 < started[0]["step"] == started[1]["step"] <= max(first)
    again = {note["step"]: note["loss"] for note in job.notes(0, "step", life=1)}
    both = first.keys() & again.keys()
    assert {step: again[step] for step in both} == {step: first[step] for step in both}
    (job.folder / "go").touch()
    assert job.code() == 0, job.text


# --- Kubernetes: a pod ----------------------------------------------------------------------------


def container_of(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first document, and the container with command, arguments and variables in it."""
    documents = list(yaml.safe_load_all(text))
    spec = documents[0]["spec"]
    jobset = spec["template"]["spec"] if "template" in spec else spec
    job = jobset["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    if len(documents) > 1:
        container |= documents[1]["spec"]["trainer"]
    return job, container


def expanded(word: str, variables: Mapping[str, str]) -> str:
    """As Kubernetes expands it: $$ is $, $(NAME) an existing variable."""

    def one(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", one, word)


def in_a_pod(
    container: Mapping[str, Any], folder: Path, runtime: Path, more: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Its words with its variables; `$` as Kubernetes reads it, paths of the pod below `folder`."""
    words = [expanded(word, more) for word in (*container["command"], *container["args"])]
    given = {entry["name"]: entry.get("value", "") for entry in container.get("env", [])}
    variables = plain_variables() | given | dict(more)
    variables |= {"XDG_RUNTIME_DIR": str(runtime), "OMP_NUM_THREADS": "1"}
    here = str(folder)
    assert words[0] == "ftrun"
    with (folder / f"{more.get('NAME', 'pod')}.out").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *(word.replace("/pod", here) for word in words)],
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


TINY = """
import os, sys, torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo")
dist.barrier()
Path(sys.argv[1], f"end{os.environ['RANK']}").write_text("\\n".join(sys.argv[2:]))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["jobset", *in_full("trainjob", "kubeflow")])
def test_the_command_of_a_manifest_runs_to_its_end(kind: str, tmp_path: Path, short: Path) -> None:
    (tmp_path / "tiny.py").write_text(TINY)
    is_runtime = kind == "kubeflow"
    directory = "/pod/checkpoints" + ("/$(TRAINJOB_NAME)" if is_runtime else "")
    words = ["--checkpoint-dir", directory, "tiny.py", "/pod"]
    words = words if is_runtime else ["--nproc-per-node", 2, *words]
    start = ["kubeflow"] if is_runtime else ["kubernetes", "--kind", kind]
    options = [*start, "--image", "registry.example/tiny:1", "--claim", "shared:/pod"]
    text = rendered(*options, "--", *words, "$(HOME)", "1e-4", folder=tmp_path)
    job, container = container_of(text)
    assert job["completions"] == 1
    # The variables that a TrainJob's controller sets for one pod.
    names = {"NNODES": "1", "NPROC_PER_NODE": "auto", "NODE_RANK": "0"}
    names |= {"MASTER_ADDR": "tiny-node-0-0.tiny", "MASTER_PORT": "29500"}
    more = {f"PET_{name}": value for name, value in names.items()} if kind != "jobset" else {}
    if is_runtime:  # of the TrainJob: its ranks, and its name; loopback replaces the pod's name
        more |= {"PET_NPROC_PER_NODE": "2", "TRAINJOB_NAME": "tiny"}
        more |= {"PET_MASTER_ADDR": "127.0.0.1"}
    process = in_a_pod(container, tmp_path, short, more)
    try:
        assert process.wait(WAIT_S) == 0, (tmp_path / "pod.out").read_text()
    finally:
        process.kill()
        process.wait()
    for rank in range(2):
        assert (tmp_path / f"end{rank}").read_text() == "$(HOME)\n1e-4"
    assert (tmp_path / "ftrun-logs" / "tiny" / "journal.jsonl").exists()
    assert not (short / "ftrun" / "tiny").exists()


@pytest.mark.full
def test_three_pods_of_a_jobset_are_one_run(tmp_path: Path, short: Path) -> None:
    """Two that train and a spare, each with its own name; loopback replaces the first's name."""
    (tmp_path / "tiny.py").write_text(TINY)
    words = ["--nnodes", 2, "--spares", 1, "tiny.py", "/pod"]
    options = ["--image", "registry.example/tiny:1", "--secret", "known"]
    text = rendered("kubernetes", *options, "--", *words, folder=tmp_path)
    job, container = container_of(text)
    assert job["completions"] == 3
    secret = tmp_path / "run"
    secret.touch(0o600)
    secret.write_bytes(os.urandom(32))
    port = free_port()
    pods = []
    for index in range(3):
        name = f"tiny-node-0-{index}"
        more = {"NAME": name, "FTRUN_NODE_ID": name, "PET_NODE_RANK": str(index)}
        more |= {"FTRUN_SECRET_FILE": str(secret), "PET_MASTER_ADDR": "127.0.0.1"}
        more |= {"PET_MASTER_PORT": str(port)}
        pods.append(in_a_pod(container, tmp_path, short, more | {"FTRUN_FAULT_DOMAIN": name}))
    try:
        codes = [pod.wait(WAIT_S) for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
            pod.wait()
    said = "\n".join(path.read_text() for path in tmp_path.glob("*.out"))
    assert codes == [0, 0, 0], said
    assert "UNAUTHENTICATED" not in said
    ends = sorted(path.name for path in itertools.chain(tmp_path.glob("end*")))
    assert ends == ["end0", "end1"]
