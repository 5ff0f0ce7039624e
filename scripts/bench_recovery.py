#!/usr/bin/env python3
"""Measure how long a killed rank stops the training, with ftrun and with torchrun.

    python scripts/bench_recovery.py --json recovery.json

Two launchers run the same two-rank DDP training in turns; the other one is suspended. In each turn
one rank gets a SIGKILL. The time runs from just before the kill until each rank has completed a
step of the next generation with its state (parameters and AdamW's moments) restored. torchrun runs
in its best case: it polls every 0.02 s, has a separate store for each restart, and reads the state
with torch.load from tmpfs.
"""

import argparse
import contextlib
import os
import re
import signal
import statistics
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import bench_common as bench

RANKS = 2
STEPS_BEFORE = 10
REFILL_S = 2.0
RUN_ID = f"bench-recovery-{os.getpid()}"
PHASES = ("detect", "decide", "stop", "fork", "rendezvous", "build", "restore", "first_step")
MOMENTS = ("detected", "started", "joined", "restored", "stepped")
"""Phases of a recovery, in order: the launcher has detected the death; the script of each rank
runs, with torch imported; all ranks are in a process group; all have their state; all have
completed a step."""
WORKER = Path(__file__).with_name("bench_recovery_worker.py")


@dataclass
class Contender(bench.RankFiles):
    """One launcher, the files of its ranks, and its measurements."""

    launcher: bench.Launcher
    times_s: list[float] = field(default_factory=list)
    killed: list[tuple[int, int]] = field(default_factory=list)
    """Of each kill: the generation that was hit, and the time in nanoseconds."""
    detected_s: list[float] = field(default_factory=list)
    """From each kill until the launcher has detected it."""

    @property
    def hold(self) -> Path:
        return self.folder / "hold"

    def has_stepped(self, count: int) -> bool:
        """Whether each rank has completed this number of steps of the newest generation."""
        now = self.begun()
        return all(len(reader.of("step", now)) >= count for reader in self.readers)

    def kill(self, rank: int) -> None:
        generation = self.begun()
        pid = self.pid(rank, generation)
        self.killed.append((generation, time.monotonic_ns()))
        os.kill(pid, signal.SIGKILL)

    def moments(self) -> dict[str, list[float]]:
        """Seconds from each kill to each of `MOMENTS`, on the last rank."""
        found = {"detected": self.detected_s}
        kinds = ("started", "begun", "restored", "step")
        for moment, kind in zip(MOMENTS[1:], kinds, strict=True):
            found[moment] = [
                max(one.of(kind, generation + 1)[0]["ns"] - kill_ns for one in self.readers) / 1e9
                for generation, kill_ns in self.killed
            ]
        return found

    def steps_repeated(self) -> list[int]:
        """Of each kill: steps that every rank had completed, and that were repeated."""
        found = []
        for generation, _ in self.killed:
            done = min(one.of("step", generation)[-1]["step"] for one in self.readers)
            first = min(one.of("step", generation + 1)[0]["step"] for one in self.readers)
            found.append(max(0, done + 1 - first))
        return found

    def new_steps(self) -> list[dict[str, Any]]:
        """The first step of each rank after the last kill; empty until all have."""
        now = self.begun()
        return self.first_steps(now) if now > self.killed[-1][0] else []


def main() -> int:
    args = parse_arguments()
    with bench.scratch() as folder, contextlib.ExitStack() as stack:
        contenders = {
            name: start(name, folder / name, args, stack) for name in ("ftrun", "torchrun")
        }
        measure(contenders, args.kills)
        phases = phases_of(contenders["ftrun"])
        contenders["torchrun"].detected_s = detected_by_torchrun(contenders["torchrun"])
    report(contenders, phases, args)
    return 0


def start(
    name: str, folder: Path, args: argparse.Namespace, stack: contextlib.ExitStack
) -> Contender:
    folder.mkdir()
    script = [WORKER, "--folder", folder, "--state-mb", args.state_mb]
    flags = ["--nproc-per-node", RANKS]
    if name == "ftrun":
        flags += ["--run-id", RUN_ID, "--snapshot-every", 1]
        command = bench.ftrun_command(*flags, *script)
    else:
        flags += ["--monitor-interval", 0.02, "--max-restarts", 1_000_000]
        command = bench.torchrun_command(*flags, *script)
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    if name == "torchrun":
        variables["TMPDIR"] = str(folder)  # torchrun leaves a folder of logs there
    running = bench.launched(name, command, folder, args.deadline, **variables)
    return Contender(folder, RANKS, stack.enter_context(running))


def measure(contenders: dict[str, Contender], kills: int) -> None:
    for name, one in contenders.items():
        one.launcher.wait_for(f"{name}'s first steps", partial(one.has_stepped, 1))
        one.hold.touch()
    for number in range(kills):
        for name, one in contenders.items():
            one.hold.unlink()
            one_kill(name, one, number % RANKS)
            one.hold.touch()


def one_kill(name: str, one: Contender, rank: int) -> None:
    one.launcher.pause(REFILL_S)
    one.launcher.wait_for(f"{name}'s steps before a kill", lambda: one.has_stepped(STEPS_BEFORE))
    one.kill(rank)
    one.launcher.wait_for(f"{name}'s first step after a kill", one.new_steps)
    end_ns = max(line["ns"] for line in one.new_steps())
    one.times_s.append((end_ns - one.killed[-1][1]) / 1e9)
    print(f"kill {len(one.killed)}, {name:8} rank {rank}: {one.times_s[-1]:7.3f} s", flush=True)


def phases_of(ftrun: Contender) -> dict[str, list[float]]:
    """The phases that ftrun itself measured; `detect` begins at the kill."""
    lines: list[dict[str, Any]] = []

    def all_there() -> bool:
        lines[:] = [e for e in bench.read_journal(ftrun.folder, RUN_ID) if e["kind"] == "recovered"]
        return len(lines) >= len(ftrun.killed)

    ftrun.launcher.wait_for("the journal", all_there)
    by_generation = {line["generation"]: line for line in lines}
    ftrun.detected_s = [
        by_generation[generation + 1]["noticed_s"] - kill_ns / 1e9
        for generation, kill_ns in ftrun.killed
    ]
    found: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for (generation, _), detected_s in zip(ftrun.killed, ftrun.detected_s, strict=True):
        measured = {"detect": detected_s, **by_generation[generation + 1]["phases_s"]}
        for phase in PHASES:
            found[phase].append(measured[phase])
    return found


def detected_by_torchrun(torchrun: Contender) -> list[float]:
    """From each kill to torchrun's own log line about it, by the time in that line.

    Raises:
        BenchError: the number of such lines differs from the number of kills.
    """
    clock_ns = time.time_ns() - time.monotonic_ns()
    text = torchrun.launcher.output.read_text(errors="replace")
    stamps = re.findall(r"^E(\d{4} [\d:.]+) .*failed \(exitcode: -9\)", text, re.MULTILINE)
    if len(stamps) != len(torchrun.killed):
        raise bench.BenchError(f"{len(torchrun.killed)} kills, torchrun has logged {len(stamps)}")
    year = datetime.now(UTC).year
    found = []
    for stamp, (_, kill_ns) in zip(stamps, torchrun.killed, strict=True):
        logged = datetime.strptime(f"{year}{stamp}", "%Y%m%d %H:%M:%S.%f").astimezone()
        found.append(logged.timestamp() - (kill_ns + clock_ns) / 1e9)
    return found


def report(
    contenders: dict[str, Contender],
    phases: dict[str, list[float]],
    args: argparse.Namespace,
) -> None:
    times = {name: bench.spread(one.times_s) for name, one in contenders.items()}
    ratio = times["torchrun"]["median"] / times["ftrun"]["median"]
    bench.show_table(
        f"SIGKILL of one of {RANKS} ranks to the next step on all, {args.state_mb:g} MB of state, "
        f"{args.kills} kills each, in seconds",
        ["launcher", "median", "min", "max"],
        [[name, *bench.cells(time_s, ".3f")] for name, time_s in times.items()],
    )
    print(f"\n  torchrun / ftrun: {ratio:.1f}")
    bench.show_table(
        "ftrun's own phases, in milliseconds",
        ["phase", "median", "min", "max"],
        [
            [phase, *bench.cells(bench.spread([1e3 * value for value in values]), ".1f")]
            for phase, values in phases.items()
        ],
    )
    moments = {name: one.moments() for name, one in contenders.items()}
    bench.show_table(
        "From the kill until, in seconds (medians)",
        ["launcher", *MOMENTS, "steps repeated"],
        [
            [
                name,
                *(f"{statistics.median(of[moment]):.3f}" for moment in MOMENTS),
                statistics.median(contenders[name].steps_repeated()),
            ]
            for name, of in moments.items()
        ],
    )
    bench.finish(
        args.json,
        {
            "ftrun_s": times["ftrun"]["median"],
            "torchrun_s": times["torchrun"]["median"],
            "ratio": ratio,
            "phases_s": {phase: statistics.median(values) for phase, values in phases.items()},
            **{
                name: {
                    **times[name],
                    "all_s": one.times_s,
                    "moments_s": {
                        at: statistics.median(all_s) for at, all_s in moments[name].items()
                    },
                    "steps_repeated": one.steps_repeated(),
                }
                for name, one in contenders.items()
            },
            "phases": {phase: bench.spread(values) for phase, values in phases.items()},
            "state_mb": args.state_mb,
            "ranks": RANKS,
        },
    )


def parse_arguments() -> argparse.Namespace:
    parser = bench.Parser(__doc__, timeout_s=600)
    parser.option("--state-mb", float, 64, "MB of parameters and moments")
    parser.option("--kills", int, 7, "number of kills of each launcher")
    return parser.parsed("kills", "state_mb")


if __name__ == "__main__":
    bench.run_bench(main)
