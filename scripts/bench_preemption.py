#!/usr/bin/env python3
"""Preempt nodes of a run by a notice, and count the steps that are made twice.

    python scripts/bench_preemption.py --json preemption.json

The job and the count are those of a published benchmark (ray-project/ray#65047: 1,600 steps, 4
preemptions, a checkpoint every 400 steps; 517 steps wasted, 91 with a save at the notice). Each
preemption is a file that appears on a node, as `--notices file:PATH` asks for.

spare   two nodes and a spare (virtual). The node leaves, the spare takes its ranks, and ftrun is
        started again on the node, as on a new machine
alone   one node, without a spare. The run stops with a checkpoint, and the same command is started
        again

wasted_steps      completed steps that were repeated, in all preemptions with a spare
wasted_alone      the same without a spare
pause_s           longest pause between two steps of all ranks, with a spare
equal             the loss of every step and the state at the end are, in both runs, byte for byte
                  those of an undisturbed run of torchrun

Exits with 1 if a byte differs.
"""

import argparse
import itertools
import signal
import subprocess
import sys
import time
from pathlib import Path

import bench_common as bench
from drill_nodes import BaselineRuns, job_argv, steps_lost, work_folder
from nodes_run import NodesRun, environment
from virtual_cluster import VirtualCluster, available

from ftrun.tools.drill.jobs import DrillJob, Outcome, difference, outcome_of

STEPS, PREEMPTIONS = 1600, 4
MEMBERS, SPARES, RANKS = 2, 1, 2
LEFT_CODE = 128 + signal.SIGTERM
_END_S = 120.0
_CHECKPOINT_S = 600.0
"""No other checkpoint is due within it."""


class Watched(NodesRun):
    """A run over nodes in which each node has a file of its own for notices."""

    def notice(self, node: int) -> Path:
        return self.folder / f"leave-node{node}"

    def start(self, node: int, *_: object) -> None:
        self.notice(node).unlink(missing_ok=True)
        super().start(node, None, ["--notices", f"file:{self.notice(node)}"])

    def preempt(self, node: int) -> None:
        """Give the notice, wait until the node has left, and start ftrun on it again."""
        before = self.generation
        self.notice(node).write_text("the machine is taken away\n")
        if (code := self.wait_for_code(node)) != LEFT_CODE:
            raise bench.BenchError(f"node{node} has left with {code}:\n{self.text(node)}")
        self.wait_for_generation(before + 1)
        joined = self.times_joined(node)
        self.start(node)
        self.wait_for(f"node{node} to join again", lambda: self.times_joined(node) > joined)


def steps_at(number: int, args: argparse.Namespace) -> int:
    return (number + 1) * args.steps // (args.preemptions + 1)


def with_spare(folder: Path, args: argparse.Namespace) -> tuple[Watched, float]:
    """Preempt the node of each rank in turn; the run, and the longest pause in seconds."""
    words = job_argv("ddp", folder, args.pace, steps=args.steps)
    with VirtualCluster(MEMBERS + SPARES) as cluster:
        run = Watched(cluster, folder, words, args.deadline, members=MEMBERS, spares=SPARES)
        run.start_all()
        for number in range(args.preemptions):
            run.wait_for_step(steps_at(number, args))
            run.preempt(run.node_of(number % MEMBERS))
        run.finish()
    return run, longest_pause_s(run)


def longest_pause_s(run: NodesRun) -> float:
    times = sorted({int(line["ns"]) for line in run.readers[0].of("step")})
    return max(after - before for before, after in itertools.pairwise(times)) / 1e9


def alone(folder: Path, args: argparse.Namespace) -> bench.RankFiles:
    """Stop the run at each notice, and start the same command again."""
    folder.mkdir()
    files, notice = bench.RankFiles(folder, RANKS), folder / "leave"
    command = [
        *(sys.executable, "-m", "ftrun", "--nproc-per-node", str(RANKS), "--run-id", folder.name),
        *("--snapshot-every", "1", "--checkpoint-dir", str(folder / "checkpoints")),
        *("--checkpoint-every", str(_CHECKPOINT_S), "--notices", f"file:{notice}"),
        *job_argv("ddp", folder, args.pace, steps=args.steps),
    ]
    for number in range(args.preemptions + 1):
        with (folder / "output").open("ab") as output:
            process = subprocess.Popen(
                command, cwd=folder, env=environment(), stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            _until_notice(process, files, number, args)
            if number < args.preemptions:
                notice.write_text("the machine is taken away\n")
            else:
                (folder / "go").touch()
            code = process.wait(_END_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        notice.unlink(missing_ok=True)
        if code != (LEFT_CODE if number < args.preemptions else 0):
            text = (folder / "output").read_text(errors="replace")[-2000:]
            raise bench.BenchError(f"start {number + 1} ended with {code}:\n{text}")
    return files


def _until_notice(
    process: "subprocess.Popen[bytes]",
    files: bench.RankFiles,
    number: int,
    args: argparse.Namespace,
) -> None:
    last = steps_at(number, args) if number < args.preemptions else args.steps - 20
    while not files.have("step") or files.readers[0].of("step")[-1]["step"] < last:
        if process.poll() is not None:
            text = (files.folder / "output").read_text(errors="replace")[-2000:]
            raise bench.BenchError(f"ftrun ended with {process.returncode}:\n{text}")
        args.deadline.check(f"step {last} of start {number + 1}")
        time.sleep(bench.POLL_S)


def repeated(files: bench.RankFiles) -> int:
    """Steps that rank 0 has completed more than once."""
    steps = [line["step"] for line in files.readers[0].of("step")]
    return len(steps) - len(set(steps))


def outcomes(folder: Path) -> list[Outcome]:
    return [outcome_of(folder / f"rank{rank}.jsonl") for rank in range(RANKS)]


def main() -> int:
    args = parse_arguments()
    if reason := available():
        raise bench.BenchError(f"no virtual cluster: {reason}")
    with work_folder(None) as folder:
        names = tuple(f"rank{rank}.jsonl" for rank in range(RANKS))
        words = tuple(job_argv("ddp", Path("FOLDER"), steps=args.steps))
        expected = BaselineRuns(folder).of(DrillJob("ddp", words, names, args.steps), RANKS)
        run, pause_s = with_spare(folder / "spare", args)
        files = alone(folder / "alone", args)
        problems = [difference(expected, outcomes(folder / one)) for one in ("spare", "alone")]
        figures = {
            "steps": args.steps,
            "preemptions": args.preemptions,
            "wasted_steps": steps_lost(run),
            "wasted_alone": repeated(files),
            "pause_s": round(pause_s, 3),
            "equal": not any(problems),
        }
    rows = [
        ["two nodes and a spare", figures["wasted_steps"], "yes" if not problems[0] else "NO"],
        ["one node, started again", figures["wasted_alone"], "yes" if not problems[1] else "NO"],
    ]
    title = f"{args.preemptions} preemptions in {args.steps} steps"
    bench.show_table(title, ["", "wasted steps", "equal"], rows)
    print(f"\n  longest pause with a spare: {pause_s:.2f} s")
    for problem in filter(None, problems):
        print(f"  DIFFERS: {problem}")
    bench.finish(args.json, figures)
    return 0 if figures["equal"] else 1


def parse_arguments() -> argparse.Namespace:
    parser = bench.Parser(__doc__, timeout_s=900)
    parser.option("--steps", int, STEPS, "steps of the run, a multiple of 10")
    parser.option("--preemptions", int, PREEMPTIONS, "preemptions, spread evenly over the steps")
    parser.option("--pace", float, 1.5, "factor on the job's usual 0.03 s a step")
    return parser.parsed("steps", "preemptions", "pace")


if __name__ == "__main__":
    bench.run_bench(main)
