"""Describes the job of a drill: a job of ftrun, or a script of the user.

It also has the outcome of the job: of a drill's run, and of an undisturbed run under torchrun.
"""

import contextlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftrun.errors import FtrunError
from ftrun.linux import end_with_parent
from ftrun.tools.drill.environments import environment, scripts_folder
from ftrun.tools.drill.plan import FaultTrial, RunSection

Outcome = dict[int | str, str]
"""Results of one rank: the loss of each step, and the final `digest`."""

_TAIL_BYTES = 8192
_STEPS_AT_LEAST = 120
_STEPS_PER_FAULT = 45
"""Steps per fault beyond its duration: to order it, to detect it, and until the next fault."""

_GPT_STEP_S = 0.05
_UNDISTURBED_S = 900.0
_GPT = ("--layers", "2", "--width", "96", "--context", "64")


@dataclass(frozen=True, slots=True)
class DrillJob:
    """One job as it is started; in `argv`, the word FOLDER is replaced by the folder of the run.

    `notes` are names of the files with results in that folder; `steps` is 0 if unknown.
    """

    name: str
    argv: tuple[str, ...]
    notes: tuple[str, ...]
    steps: int = 0

    def words(self, folder: Path) -> list[str]:
        return [str(folder) if word == "FOLDER" else word for word in self.argv]

    def note_files(self, folder: Path) -> list[Path]:
        return [folder / name for name in self.notes]

    def let_go(self, folder: Path) -> None:
        """Creates the file `go`; until then ftrun's own jobs run slowly and do not end."""
        (folder / "go").touch()

    def last_step(self, path: Path) -> int:
        """Returns the newest step in a file of notes; -1 if there is none."""
        if not path.exists():
            return -1
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            tail = file.read()
        steps = [line["step"] for line in _lines_of(tail) if "loss" in line and "step" in line]
        return int(steps[-1]) if steps else -1


def _lines_of(data: bytes) -> Iterator[dict[str, Any]]:
    """Yields the complete lines; the end of a file usually begins within a line."""
    for raw in data.split(b"\n")[:-1]:
        with contextlib.suppress(ValueError):
            line = json.loads(raw)
            if isinstance(line, dict):
                yield line


def steps_for(part: RunSection, trials: Sequence[FaultTrial]) -> int:
    """Returns the steps that a run with these faults needs, rounded up to a multiple of 10."""
    step_s = part.step_s or (_GPT_STEP_S if part.job == "gpt" else max(part.pace, 0.01))
    faults_s = sum(
        max(min(trial.lasts_s, 600.0), _continuation_s(trial)) / step_s for trial in trials
    )
    between = max(part.steps_between, 1) * (len(trials) + 1)
    named = max((trial.step for trial in trials), default=0)
    steps = _STEPS_AT_LEAST + _STEPS_PER_FAULT * len(trials) + between + faults_s + named
    return math.ceil(steps / 10) * 10


def _continuation_s(trial: FaultTrial) -> float:
    """Returns how long the job may make steps before the fault is detected; 0 for a hang."""
    kinds = ("slow computation", "slow communication", "replicas differ")
    return trial.expected.within_s if set(trial.expected.verdicts) & {*kinds} else 0.0


def job_for(part: RunSection, steps: int) -> DrillJob:
    if part.script is not None:
        script = Path(part.script).resolve()
        if not script.is_file():
            raise FtrunError(f"{part.script}: there is no such script under {Path.cwd()}")
        notes = (part.notes,) if part.notes else ()
        return DrillJob(script.name, (str(script), *part.args), notes)
    folder = scripts_folder()
    if part.job == "gpt":
        argv = (str(folder / "train_gpt.py"), "--steps", str(steps), *_GPT, *part.args)
        return DrillJob("gpt", (*argv, "--losses", "losses.jsonl"), ("losses.jsonl",), steps)
    argv = (
        str(folder / "drill_job.py"), "--folder", "FOLDER", "--kind", part.job,
        "--steps", str(steps), "--pace", str(part.pace),
    )  # fmt: skip
    world = part.nodes * part.ranks
    return DrillJob(part.job, argv, tuple(f"rank{rank}.jsonl" for rank in range(world)), steps)


@dataclass
class BaselineRuns:
    """Outcomes under torchrun; each job is run once per number of ranks."""

    folder: Path
    _found: dict[tuple[DrillJob, int], list[Outcome]] = field(default_factory=dict)

    def of(self, job: DrillJob, ranks: int) -> list[Outcome]:
        """The outcome of each rank, or nothing; FtrunError if torchrun fails or times out."""
        if not job.notes:
            return []
        if (job, ranks) not in self._found:
            folder = self.folder / f"undisturbed-{len(self._found) + 1}-{job.name}-{ranks}"
            self._found[job, ranks] = self._run(job, ranks, folder)
        return self._found[job, ranks]

    def _run(self, job: DrillJob, ranks: int, folder: Path) -> list[Outcome]:
        folder.mkdir(parents=True)
        job.let_go(folder)
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        output = folder / "output"
        with output.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, *torchrun, *job.words(folder)], cwd=folder,
                env=environment({"TMPDIR": str(folder)}),  # torchrun leaves a log folder there
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                preexec_fn=end_with_parent,
            )  # fmt: skip
            try:
                code = process.wait(_UNDISTURBED_S)
            except subprocess.TimeoutExpired:
                raise FtrunError(f"torchrun takes over {_UNDISTURBED_S:.0f} s: {output}") from None
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        found = [outcome_of(path) for path in job.note_files(folder)]
        # A rank may abort during gloo's shutdown, after it has recorded all compared values.
        is_whole = all("digest" in one for one in found)
        if code != 0 and not is_whole:
            printed = output.read_text(errors="replace")[-2000:]
            raise FtrunError(f"torchrun ended with {code}:\n{printed}")
        return found


def outcome_of(path: Path) -> Outcome:
    """If a repeated step has another result, both are joined to a text that equals no outcome."""
    found: Outcome = {}
    for line in _lines_of(path.read_bytes() if path.exists() else b""):
        at: int | str
        if "loss" in line and "step" in line:
            at, value = int(line["step"]), str(line["loss"])
        elif "digest" in line:
            at, value = "digest", str(line["digest"])
        else:
            continue
        if found.setdefault(at, value) != value:
            found[at] += f" and {value}"
    return found


def difference(expected: Sequence[Outcome], found: Sequence[Outcome]) -> str:
    """Describes the first difference; empty if there is none."""
    return first_difference(expected, found)[1]


def first_difference(
    expected: Sequence[Outcome], found: Sequence[Outcome]
) -> tuple[int | str | None, str]:
    """The step of the first difference (or `digest`) and its description; (None, ""): none."""
    differences: list[tuple[int | str, str]] = []
    for rank, (right, is_so) in enumerate(zip(expected, found, strict=True)):
        for at in right:
            if is_so.get(at) != right[at]:
                what = "the state at the end" if at == "digest" else f"the loss of step {at}"
                printed = f"{what} of rank {rank} is {is_so.get(at)}, undisturbed {right[at]}"
                differences.append((at, printed))
                break
    if not differences:
        return None, ""
    return min(differences, key=lambda one: one[0] if isinstance(one[0], int) else 1 << 60)
