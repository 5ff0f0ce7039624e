#!/usr/bin/env python3
"""Kill ranks at random moments, and count lost steps and torn states.

    python scripts/bench_kills.py --kills 50 --seed 1 --json kills.json

Two ranks under ftrun have --mb of their own state each, saved at every step. Most kills come at a
random moment after training has resumed, some while the run still restores; some kill both ranks.
After each kill, the ranks compare all of their state with its exact value at the restored step, bit
for bit.

lost_more_than_one: more than one step that all ranks had completed had to be repeated, in addition
to the step in flight. torn: the state was not exactly that of one step on all ranks. Exits with 0
only if both are 0.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench_common as bench

RANKS = 2
RUN_ID = f"bench-kills-{os.getpid()}"
EARLY = 0.1  # part of the kills that come while the run still restores
BOTH = 0.1  # part of the kills that hit both ranks
WORKER = Path(__file__).with_name("bench_kills_worker.py")
BEGINNINGS = ("restored", "anew")


@dataclass
class Checker(bench.RankFiles):
    """Reads the ranks' files and judges each recovery."""

    launcher: bench.Launcher
    lost: list[int] = field(default_factory=list)
    """Of each judged recovery: completed steps that were repeated."""
    torn: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    reached: int = 0
    """Steps that all ranks have completed or restored."""
    judged: int = 0
    """The newest judged generation."""

    def completed(self, generation: int) -> int | None:
        """Steps that all ranks have completed; None if none was completed in that generation."""
        found = [reader.of("step", generation) for reader in self.readers]
        return min(lines[-1]["step"] + 1 for lines in found) if all(found) else None

    def beginnings(self, generation: int) -> list[dict[str, Any]]:
        """The step at which each rank began that generation."""
        return [
            line
            for reader in self.readers
            for kind in BEGINNINGS
            for line in reader.of(kind, generation)
        ]

    def has_gone_on(self, after: int) -> bool:
        """Whether all ranks of a later generation have restored and passed the previous step."""
        now = self.begun()
        if now <= after or len(self.beginnings(now)) < RANKS:
            return False
        return (self.completed(now) or 0) > self.reached

    def judge(self, killed: int, kill_ns: int) -> None:
        """Wait until training has resumed after a kill, and judge the restored state."""
        self.reached = max(self.reached, self.completed(killed) or 0)
        what = f"the recovery from the kill in generation {killed}"
        self.launcher.wait_for(what, lambda: self.has_gone_on(killed))
        now = self.begun()
        found = self.beginnings(now)
        steps = {line["step"] for line in found}
        wrong = [f"{part} of step {line['step']}" for line in found for part in line["wrong"]]
        if len(steps) > 1 or wrong:
            self.torn.append(f"generation {now}: restored to steps {sorted(steps)}; {wrong}")
        # Read again: the survivor may have completed a step after the kill.
        self.reached = max(self.reached, self.completed(killed) or 0)
        self.lost.append(self.reached - min(steps))
        stepped_ns = max(line["ns"] for line in self.first_steps(now))
        self.times_s.append((stepped_ns - kill_ns) / 1e9)
        self.judged = now
        if self.lost[-1] > 1:
            print(self.evidence(killed, now), flush=True)

    def evidence(self, killed: int, now: int) -> str:
        """Records of the ranks around a recovery that lost too much."""
        lines = [f"  generation {now} lost {self.lost[-1]} completed steps:"]
        for rank, reader in enumerate(self.readers):
            last = reader.of("step", killed)[-3:]
            seen = [*last, *self.beginnings(now)[rank : rank + 1]]
            lines += [f"    rank {rank}: {json.dumps(line)}" for line in seen]
        return "\n".join(lines)


def main() -> int:
    args = parse_arguments()
    with bench.scratch() as folder:
        flags = ["--nproc-per-node", RANKS, "--run-id", RUN_ID, "--snapshot-every", 1]
        command = bench.ftrun_command(*flags, WORKER, "--folder", folder, "--mb", args.mb)
        with bench.launched("ftrun", command, folder, args.deadline) as launcher:
            checker = Checker(folder, RANKS, launcher)
            kills = break_it(checker, args)
            last = max(reader.of("step")[-1]["step"] for reader in checker.readers)
        journal = bench.read_journal(folder, RUN_ID)
    report(checker, kills, last, journal, args)
    return 1 if checker.torn or any(lost > 1 for lost in checker.lost) else 0


def break_it(checker: Checker, args: argparse.Namespace) -> int:
    chance = random.Random(args.seed)
    launcher = checker.launcher
    launcher.wait_for("the first steps", lambda: (checker.completed(0) or 0) >= 3)
    kills = 0
    while kills < args.kills:
        launcher.pause(chance.uniform(0.0, args.within))
        killed, kill_ns = kill(checker, chance)
        kills += 1
        if chance.random() < EARLY and kills < args.kills:
            launcher.wait_for("the ranks' restart", lambda hit=killed: checker.begun() > hit)
            launcher.pause(chance.uniform(0.0, 0.3))
            checker.reached = max(checker.reached, checker.completed(killed) or 0)
            killed, kill_ns = kill(checker, chance)
            kills += 1
        checker.judge(killed, kill_ns)
        print(
            f"kills {kills:3}: generation {checker.judged}, repeated {checker.lost[-1]}, "
            f"{checker.times_s[-1]:.3f} s, {len(checker.torn)} torn",
            flush=True,
        )
    return kills


def kill(checker: Checker, chance: random.Random) -> tuple[int, int]:
    """SIGKILL one rank, sometimes both; return the generation that was hit, and the time."""
    generation = checker.begun()
    ranks = range(RANKS) if chance.random() < BOTH else [chance.randrange(RANKS)]
    pids = [checker.pid(rank, generation) for rank in ranks]
    kill_ns = time.monotonic_ns()
    for pid in pids:
        # ftrun may have ended the other rank at this moment.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return generation, kill_ns


def report(
    checker: Checker,
    kills: int,
    last: int,
    journal: list[dict[str, Any]],
    args: argparse.Namespace,
) -> None:
    lost_more = sum(lost > 1 for lost in checker.lost)
    counts = collections.Counter(checker.lost)
    restarts = sum(event["kind"] == "generation_started" for event in journal) - 1
    times_s = bench.spread(checker.times_s)
    bench.show_table(
        f"{kills} kills at random moments (seed {args.seed}), {args.mb:g} MB per rank saved at "
        "every step",
        ["what", "count"],
        [
            ["kills", kills],
            ["restarts", restarts],
            ["steps in all", last + 1],
            *[[f"recoveries that repeated {n} completed", counts[n]] for n in sorted(counts)],
            ["lost more than one step", lost_more],
            ["torn or mixed state", len(checker.torn)],
        ],
    )
    if lost_more:
        for event in journal:
            if event["kind"] == "restore_point_chosen":
                print(f"  {event['version']}: {event['reason']}")
    for text in checker.torn:
        print(f"  TORN: {text}")
    print(
        f"\n  from a kill to the next step on all ranks: median {times_s['median']:.3f} s, "
        f"{times_s['min']:.3f} to {times_s['max']:.3f} (the ranks' own check included)"
    )
    bench.finish(
        args.json,
        {
            "kills": kills,
            "lost_more_than_one": lost_more,
            "torn": len(checker.torn),
            "torn_details": checker.torn,
            "repeated_steps": {str(n): counts[n] for n in sorted(counts)},
            "restarts": restarts,
            "steps": last + 1,
            "recovery_s": times_s,
            "mb": args.mb,
            "seed": args.seed,
        },
    )


def parse_arguments() -> argparse.Namespace:
    parser = bench.Parser(__doc__, timeout_s=1200)
    parser.option("--kills", int, 50, "number of kills")
    parser.option("--mb", float, 256, "MB of state per rank")
    parser.option("--seed", int, 1, "seed of the random moments")
    parser.option("--within", float, 1.5, "seconds after resuming in which a kill comes")
    return parser.parsed("kills", "mb")


if __name__ == "__main__":
    bench.run_bench(main)
