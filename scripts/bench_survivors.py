#!/usr/bin/env python3
"""Measure how long a killed rank stops the training if the other ranks stay.

    python scripts/bench_survivors.py --json survivors.json

Three jobs with two ranks: a small model, the same with seconds of computation as set-up, and the
same compiled. Each runs under `ftrun --survivors on` with rehearsed standbys, under ftrun with full
restarts, under torchrun, and under torchft if it is installed, one after another. In each, ranks
get a SIGKILL in turns, while the standbys are ready. The time runs from just before the kill until
each rank has completed a step of the next generation. The parameters of every step are compared
with those of an undisturbed run. torchrun runs in its best case, as in bench_recovery.py. With
torchft each rank is a replica group; the other one continues without it, so the sums change, and
its steps are not compared.
"""

import argparse
import contextlib
import importlib.util
import os
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench_common as bench

RANKS = 2
STEPS_BEFORE = 10
REFILL_S = 2.0
ASK_EVERY_S = 0.5
PACE_S = 0.02
"""Pause at the end of a turn, so that a run has few steps."""

FOREVER = 1 << 40
JOBS = ("small", "setup", "compiled")
PREFIXES = {"survivors": "", "full": "full_", "torchrun": "torchrun_", "torchft": "torchft_"}
HAS_TORCHFT = importlib.util.find_spec("torchft") is not None
CONTENDERS = [name for name in PREFIXES if name != "torchft" or HAS_TORCHFT]
READY = "rehearsed ranks: " + ", ".join(map(str, range(RANKS)))
WORKER = Path(__file__).with_name("bench_survivors_worker.py")

Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Kill:
    """One kill of a rank."""

    rank: int
    generation: int
    ns: int


@dataclass
class Measured:
    """Seconds of each kill of one contender in one job."""

    all_s: list[float] = field(default_factory=list)
    """Until every rank has completed a step."""
    replaced_s: list[float] = field(default_factory=list)
    """Until the killed rank has."""
    pause_s: list[float] = field(default_factory=list)
    """Between two steps of the rank that was not killed."""

    def add(self, lines: Sequence[Lines], kill: Kill) -> None:
        times = seconds_to_step(lines, kill)
        self.all_s.append(max(times))
        self.replaced_s.append(times[kill.rank])
        others = (one for rank, one in enumerate(lines) if rank != kill.rank)
        self.pause_s.append(max(pause_of(one, kill) for one in others))


def seconds_to_step(lines: Sequence[Lines], kill: Kill) -> list[float]:
    """From the kill to the first step of a later generation, by rank; empty until all have one."""
    found = []
    for of_rank in lines:
        later = (line["ns"] for line in of_rank if line["generation"] > kill.generation)
        found.append((next(later, kill.ns) - kill.ns) / 1e9)
    return found if all(found) else []


def pause_of(lines: Lines, kill: Kill) -> float:
    """Seconds between the last step of a rank in the killed generation and its next one."""
    last = max(line["ns"] for line in lines if line["generation"] <= kill.generation)
    first = min(line["ns"] for line in lines if line["generation"] > kill.generation)
    return float(first - last) / 1e9


def wrong_steps(lines: Sequence[Lines], expected: Sequence[Lines]) -> list[int]:
    """Steps whose parameters or loss differ from the undisturbed run, or are not in it."""
    found: set[int] = set()
    for of_rank, reference in zip(lines, expected, strict=True):
        right = {line["step"]: line["digest"] for line in reference}
        found |= {x["step"] for x in of_rank if right.get(x["step"]) != x["digest"]}
    return sorted(found)


def figures_of(measured: Mapping[tuple[str, str], Measured]) -> dict[str, float]:
    """Medians by key, from the measurements by contender and job."""
    found: dict[str, float] = {}
    for (contender, job), one in measured.items():
        prefix = PREFIXES[contender]
        found[f"{prefix}{job}_s"] = statistics.median(one.all_s)
        if job == "small":
            found[f"{prefix}survivor_pause_s"] = statistics.median(one.pause_s)
            found[f"{prefix}replaced_rank_s"] = statistics.median(one.replaced_s)
    return found


# --- runs -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Run(bench.RankFiles):
    """One contender in one job."""

    contender: str
    run_id: str
    launcher: bench.Launcher
    asked_s: float = 0.0
    is_ready: bool = False

    @property
    def lines(self) -> list[list[dict[str, Any]]]:
        return [reader.of("step") for reader in self.readers]

    def has_stepped(self) -> bool:
        """Whether each rank has completed enough steps since the last kill."""
        now = self.newest("step")
        return all(len(reader.of("step", now)) >= STEPS_BEFORE for reader in self.readers)

    def may_be_hit(self) -> bool:
        """Whether the standbys of this contender are ready."""
        if self.contender == "survivors" and time.monotonic() > self.asked_s + ASK_EVERY_S:
            self.is_ready = READY in bench.ftrun_status(self.run_id).get("survivors", "")
            self.asked_s = time.monotonic()
        return self.is_ready or self.contender != "survivors"

    def kill(self, rank: int) -> Kill:
        self.launcher.pause(REFILL_S)
        self.launcher.wait_for("steps before a kill", self.has_stepped)
        self.is_ready = False
        self.launcher.wait_for("rehearsed standbys", self.may_be_hit)
        line = self.lines[rank][-1]
        kill = Kill(rank, line["generation"], time.monotonic_ns())
        os.kill(line["pid"], signal.SIGKILL)
        self.launcher.wait_for(
            "the first step after a kill", lambda: seconds_to_step(self.lines, kill)
        )
        return kill


def main() -> int:
    args = parse_arguments()
    measured: dict[tuple[str, str], Measured] = {}
    wrong: dict[str, list[int]] = {}
    with bench.scratch() as folder:
        for job in args.jobs:
            lines = {}
            for contender in args.contenders:
                measured[contender, job], lines[contender] = measure(folder, contender, job, args)
            lines.pop("torchft", None)
            if not lines:
                continue
            last = max(x["step"] for all_ in lines.values() for one in all_ for x in one)
            expected = reference(folder, job, last + 1, args)
            for contender, found in lines.items():
                wrong[f"{contender} {job}"] = wrong_steps(found, expected)
    report(measured, wrong, args)
    return 0


def measure(
    folder: Path, contender: str, job: str, args: argparse.Namespace
) -> tuple[Measured, list[list[dict[str, Any]]]]:
    found = Measured()
    with started(folder / f"{contender}-{job}", contender, job, args) as run:
        run.launcher.wait_for("the first steps", lambda: run.newest("step") >= 0)
        for number in range(args.kills):
            kill = run.kill(number % RANKS)
            found.add(run.lines, kill)
            print(f"{contender:9} {job:8} rank {kill.rank}: {found.all_s[-1]:7.3f} s", flush=True)
        return found, run.lines


@contextlib.contextmanager
def started(
    folder: Path, contender: str, job: str, args: argparse.Namespace, until: int = FOREVER
) -> Iterator[Run]:
    """A run with pauses that never ends, or one without them of a number of steps."""
    folder.mkdir()
    run_id = f"bench-survivors-{os.getpid()}-{contender}-{job}"
    pace_s = PACE_S if until == FOREVER else 0.0
    script = [WORKER, "--folder", folder, "--job", job, "--setup-s", args.setup_s]
    script += ["--pace-s", pace_s, "--until", until, "--launcher", contender]
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "compiled")}
    if contender != "torchft":  # its manager needs the store of torchrun's agent
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    flags: list[object] = ["--nproc-per-node", 1 if contender == "torchft" else RANKS]
    if contender in ("torchrun", "torchft"):
        variables["TMPDIR"] = str(folder)  # torchrun leaves a folder of logs there
        flags += ["--monitor-interval", 0.02, "--max-restarts", 1_000_000]
        command = bench.torchrun_command(*flags, *script)
    else:
        flags += ["--run-id", run_id, "--snapshot-every", 1]
        flags += ["--survivors", "on", "--rehearse", "all"] if contender == "survivors" else []
        command = bench.ftrun_command(*flags, *script)
    with contextlib.ExitStack() as stack:
        groups = [variables]
        if contender == "torchft":
            lighthouse = stack.enter_context(torchft_lighthouse())
            shared = {**variables, "TORCHFT_LIGHTHOUSE": lighthouse}
            groups = [{**shared, "REPLICA_GROUP_ID": str(rank)} for rank in range(RANKS)]
        launchers = [
            stack.enter_context(
                bench.launched(f"{contender}{at}", command, folder, args.deadline, **of_group)
            )
            for at, of_group in enumerate(groups)
        ]
        yield Run(folder, RANKS, contender, run_id, launchers[0])


@contextlib.contextmanager
def torchft_lighthouse() -> Iterator[str]:
    """The address of a lighthouse with its own limit of 5 s without a heartbeat."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=100, quorum_tick_ms=10)
    try:
        yield server.address()
    finally:
        server.shutdown()


def reference(
    folder: Path, job: str, until: int, args: argparse.Namespace
) -> list[list[dict[str, Any]]]:
    """The step lines of an undisturbed run under torchrun, without set-up."""
    base = folder / f"undisturbed-{job}"
    job = "small" if job == "setup" else job
    with started(base, "torchrun", job, args, until) as run:
        run.launcher.wait_for_end()
        return run.lines


def report(
    measured: Mapping[tuple[str, str], Measured],
    wrong: Mapping[str, list[int]],
    args: argparse.Namespace,
) -> None:
    rows = []
    for job in args.jobs:
        for contender in args.contenders:
            one = measured[contender, job]
            times = (one.all_s, one.replaced_s, one.pause_s)
            cells = [f"{statistics.median(values):.3f}" for values in times]
            rows.append([job, contender, *cells, f"{min(one.all_s):.3f}", f"{max(one.all_s):.3f}"])
    bench.show_table(
        f"SIGKILL of one of {RANKS} ranks to the next step, {args.kills} kills each, in seconds "
        f"(medians); set-up: {args.setup_s:g} s of a processor",
        ["job", "launcher", "all ranks", "killed rank", "pause of the other", "min", "max"],
        rows,
    )
    is_equal = bool(wrong) and not any(wrong.values())
    for name, steps in wrong.items():
        if steps:
            print(f"\n  {name}: {len(steps)} steps differ, the first is {steps[0]}")
    print(f"\n  every step equal to the undisturbed run, bit for bit: {is_equal}")
    details = {f"{contender} {job}": vars(one) for (contender, job), one in measured.items()}
    bench.finish(
        args.json,
        {
            **figures_of(measured),
            "equal": is_equal,
            "setup_seconds": args.setup_s,
            "all": details,
        },
    )


def parse_arguments() -> argparse.Namespace:
    parser = bench.Parser(__doc__, timeout_s=1800)
    parser.option("--kills", int, 5, "number of kills of each launcher in each job")
    parser.option("--setup-s", float, 5, "seconds of a processor that the set-up takes")
    for name, all_ in (("jobs", JOBS), ("contenders", CONTENDERS)):
        parser.add_argument(f"--{name}", nargs="+", choices=all_, default=all_, help="some of them")
    return parser.parsed("kills", "setup_s")


if __name__ == "__main__":
    bench.run_bench(main)
