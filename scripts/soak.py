#!/usr/bin/env python3
"""Kill parts of a training over three nodes and a spare, hundreds of times, and compare its result.

    sudo python scripts/soak.py --kills 1200 --json soak.json
    sudo python scripts/soak.py --kills 20 --only agent --keep logs

Each training has one rank on each of three virtual nodes, a spare, a snapshot at every step, and
DDP or FSDP2 in turns. Every few seconds, at a random moment, it gets one of these faults:

rank smp zygote agent  a process, by SIGKILL; sometimes while the run still recovers from another
stub                   the started ftrun of a node, by SIGKILL; it is started again
node leader            a node (or the leader's) loses power, or all its processes; it returns as a
                       spare
link                   the cable of a node or the link between two nodes, for 0.2 to 12 s

The last four come only when the run reports that it survives the loss of any node. Figures of each
training:

steps_repeated_max             completed steps that one recovery repeated
lost_more_than_promised        recoveries to a version before the newest committed one
equal                          losses and final state are byte for byte those of torchrun
effective_training_time_ratio  completed steps times the usual time of a step, per second

After ^C the same command continues with the next whole training; --json keeps the complete ones.
The JSON contains the limits that are raised for a soak. Exits with 0 if all results are equal and
nothing is lost.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_common import (
    BenchError,
    Parser,
    commit,
    conditions,
    run_bench,
    scratch,
    show_table,
    write_json,
)
from drill_nodes import KINDS as JOBS
from drill_nodes import job_argv
from soak_kills import KINDS
from soak_training import (
    BUDGETS,
    MEMBERS,
    BaselineRuns,
    Training,
    deck,
    steps_for,
    summary,
    train,
)
from virtual_cluster import available

from ftrun.tools.drill.jobs import DrillJob, Outcome

Piece = dict[str, Any]


def main() -> int:
    args = parse_arguments()
    if reason := available():
        raise BenchError(f"a soak needs virtual nodes, and they need root: {reason}")
    pieces = pieces_of(args.json)
    print(f"seed {args.seed}; {sum(piece['kills'] for piece in pieces)} kills are done", flush=True)
    with scratch(base=None) as folder:  # /dev/shm is each node's own
        undisturbed = BaselineRuns(folder)
        while (left := args.kills - sum(piece["kills"] for piece in pieces)) > 0:
            piece = soak(args, len(pieces), min(left, args.training_kills), folder, undisturbed)
            pieces.append(piece)
            write(args, pieces)
            if not piece["equal"] or piece["lost_more_than_promised"]:
                break
    report(summary(pieces), pieces)
    return 0 if is_good(summary(pieces)) else 1


def is_good(found: Piece) -> bool:
    return bool(found["equal"]) and not found["lost_more_than_promised"]


def soak(
    args: argparse.Namespace, number: int, kills: int, folder: Path, undisturbed: BaselineRuns
) -> Piece:
    """One training; its logs are kept after a failure, or on request."""
    seed, job = f"{args.seed}-{number}", (args.job or JOBS)[number % len(args.job or JOBS)]
    kinds = deck(args.only or KINDS, kills, random.Random(seed))
    expected = outcome_of_undisturbed(job, steps_for(kills), undisturbed)
    print(f"\ntraining {number} ({job}), seed {seed}: {kills} kills", flush=True)
    logs = folder / f"training-{number}"
    found = train(logs, seed, job, kinds, expected)
    keep_logs(args, found, logs)
    print(
        f"training {number}: {found.kills} kills, {found.restarts} restarts, "
        f"{found.seconds:.0f} s, at most {found.steps_repeated_max} steps repeated, "
        + ("equal" if found.equal else f"FAILED: {found.problem}"),
        flush=True,
    )
    when = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": commit()}
    return {**when, **asdict(found)}


def outcome_of_undisturbed(job: str, steps: int, undisturbed: BaselineRuns) -> list[Outcome]:
    names = tuple(f"rank{rank}.jsonl" for rank in range(MEMBERS))
    words = job_argv(job, Path("FOLDER"), steps=steps)
    return undisturbed.of(DrillJob(job, tuple(words), names, steps), MEMBERS)


def keep_logs(args: argparse.Namespace, found: Training, logs: Path) -> None:
    is_good = found.equal and not found.lost_more_than_promised
    if args.keep is not None or not is_good:
        base = args.keep or Path(tempfile.gettempdir())
        base.mkdir(parents=True, exist_ok=True)
        kept = Path(tempfile.mkdtemp(prefix=f"soak-{found.seed}-", dir=base.resolve()))
        shutil.copytree(logs, kept, dirs_exist_ok=True)
        (kept / "training.json").write_text(json.dumps(asdict(found), indent=1) + "\n")
        print(f"logs: {kept}", flush=True)
    shutil.rmtree(logs, ignore_errors=True)


# --- the JSON ---------------------------------------------------------------------------------


def pieces_of(path: Path | None) -> list[Piece]:
    """Trainings of earlier runs of the same command."""
    if path is None or not path.exists():
        return []
    return list(json.loads(path.read_text())["trainings"])


def write(args: argparse.Namespace, pieces: list[Piece]) -> None:
    write_json(
        args.json,
        {
            **summary(pieces),
            "seed": args.seed,
            "budgets": BUDGETS,
            "conditions": conditions(),
            "trainings": pieces,
        },
    )


def report(found: Piece, pieces: list[Piece]) -> None:
    rows = [[name, count] for name, count in found["by_kind"].items()]
    rows += [[name, found[name]] for name in found if name != "by_kind"]
    show_table(f"{len(pieces)} trainings on {MEMBERS} nodes and a spare", ["what", "count"], rows)
    print("\n  raised for this: " + ", ".join(f"{key}={value}" for key, value in BUDGETS.items()))


def parse_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.option("--kills", int, 1200, "number of kills in total")
    parser.add_argument("--training-kills", type=int, default=100, metavar="N",
                        help="number of kills of one training (default %(default)s)")  # fmt: skip
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of kinds and moments (%(default)s)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="file of the complete trainings, read and written"
    )
    parser.add_argument("--only", action="append", metavar="KIND", choices=KINDS)
    parser.add_argument("--job", action="append", choices=JOBS, help="default: both, in turns")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep all logs in this folder")
    args = parser.parse_args()
    if args.kills < 1 or args.training_kills < 1:
        parser.error("--kills and --training-kills are positive")
    if sys.platform != "linux":
        parser.error("virtual nodes need Linux")
    return args


if __name__ == "__main__":
    run_bench(main)
