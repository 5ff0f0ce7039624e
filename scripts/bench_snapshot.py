#!/usr/bin/env python3
"""Measure the cost of a snapshot; compare with torch.save to tmpfs and DCP's async_save.

    python scripts/bench_snapshot.py --mb 512 --json snapshot.json

Two ranks have --mb of parameters and AdamW's moments each, without replicas, and take a snapshot at
every step. Forward and backward take about four times as long as a copy of the state. Steps without
snapshots, with ftrun's and with each peer's run in turns in one process.

With `--device fake` the state is on the device of the tests, whose streams are threads of this
machine. Its rates mean nothing; it shows for which time the training thread is blocked while the
device copies. Each step waits for its backward before the update, as gradient clipping does.

blocked_ms        time for which a snapshot blocks the training thread, including the wait in the
                  optimizer's pre-hook
boundary_ms       the part of it at the boundary itself
added_over_copy   step time minus step time without snapshots, divided by the time of a warm
                  Tensor.copy_
step_overhead     the same divided by the step time without snapshots
copy_over_memcpy  rate of the snapshot's copy divided by that of a warm Tensor.copy_, both while
                  the training is idle, on all ranks at once
first_over_tenth  time of the first snapshot divided by that of the tenth, from boundary to seal
memory_over_two_slots  memory of all snapshots divided by two times the state

With --replicated all ranks hold the same state, as with DDP, and share it. A copy is then one of
the bytes that a rank copies; figures are those after the ranks have begun to share.

memory_over_state  memory of all snapshots of the node divided by the state of one rank
"""

import argparse
import json
import os
from pathlib import Path
from statistics import median
from typing import Any

import bench_common as bench

RANKS = 2
REPLICATED_RANKS = 4
RUN_ID = f"bench-snapshot-{os.getpid()}"
NEAR_THE_TENTH = slice(7, 12)
MEMORY_NEEDED = 11  # times --mb on each rank, the peers' files included
MEMORY_REPLICATED = 6  # the same: state, gradients, two slots, and less than two of other uses
PEERS = ("torch.save", "async_save")
WORKER = Path(__file__).with_name("bench_snapshot_worker.py")


def main() -> int:
    args = parse_arguments()
    times = MEMORY_REPLICATED if args.replicated else MEMORY_NEEDED
    bench.check_memory(args.ranks * (times * args.mb * 1e6 + 4e8))
    with bench.scratch() as folder:
        results, status = run(args, folder)
    figures = ftrun_figures(results, status)
    peers = {} if args.no_peers else {name: peer_figures(name, results) for name in PEERS}
    report(figures, peers, results, args)
    return 0


def run(args: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Each rank's raw times, and the `ftrun status` document when all memory was in use."""
    words: list[object] = ["--folder", folder, "--mb", args.mb, "--times-copy", args.times_copy]
    words += ["--rounds", args.rounds, "--block", args.block, "--device", args.device]
    words += ["--no-peers", int(args.no_peers), "--replicated", int(args.replicated)]
    flags = ["--nproc-per-node", args.ranks, "--run-id", RUN_ID, "--snapshot-every", 1]
    variables = {}
    if args.device == "fake":  # torch knows it before the standbys are forked, as it knows a GPU
        flags += ["--preload", "fake_device.preloaded"]
        tests = str(Path(__file__).parents[1] / "tests")
        variables = {"PYTHONPATH": os.pathsep.join([bench.python_path(), tests])}
    # A restart would mix two generations in one measurement.
    command = bench.ftrun_command(*flags, "--max-restarts", 0, WORKER, *words)
    files = bench.RankFiles(folder, args.ranks)
    results = [folder / f"rank{rank}.json" for rank in range(args.ranks)]
    with bench.launched("ftrun", command, folder, args.deadline, **variables) as launcher:
        launcher.wait_for("the first snapshots", lambda: files.have("warm"))
        status = bench.ftrun_status(RUN_ID)
        launcher.wait_for("the measurement", lambda: files.have("measured"))
        return [json.loads(path.read_text()) for path in results], status


def pooled(results: list[dict[str, Any]], mode: str, key: str) -> list[float]:
    return [sample[key] for result in results for sample in result["samples"][mode]]


def copy_s(results: list[dict[str, Any]]) -> float:
    """A warm Tensor.copy_ of one rank's state, all ranks at once."""
    return float(median(time_s for result in results for time_s in result["copy_s"]))


def cost(mode: str, results: list[dict[str, Any]], blocked: str) -> dict[str, float]:
    """`blocked`: the key of the time for which a snapshot blocks the training thread."""
    blocked_s = pooled(results, mode, blocked)
    plain_s = median(pooled(results, "plain", "step_s"))
    added_s = median(pooled(results, mode, "step_s")) - plain_s
    return {
        "blocked_ms": 1e3 * median(blocked_s),
        "blocked_ms_max": 1e3 * max(blocked_s),
        "boundary_ms": 1e3 * median(pooled(results, mode, "call_s")),
        "added_ms": 1e3 * added_s,
        "added_over_copy": added_s / copy_s(results),
        "step_overhead": added_s / plain_s,
    }


def first_over_tenth(times_s: list[list[float]]) -> float:
    """The worst rank's; the tenth is the median of the snapshots around it."""
    return max(own_s[0] / median(own_s[NEAR_THE_TENTH] or own_s[-1:]) for own_s in times_s)


def ftrun_figures(results: list[dict[str, Any]], status: dict[str, Any]) -> dict[str, float]:
    state_bytes = sum(result["bytes"] for result in results)
    idle_s = median(time_s for result in results for time_s in result["idle_s"])
    memory_bytes = (status.get("snapshots") or {}).get("memory_bytes", 0)
    return {
        **cost("ftrun", results, "blocked_s"),
        "copy_over_memcpy": copy_s(results) / idle_s,
        "copy_gb_per_s": results[0]["copied_bytes"] / idle_s / 1e9,
        "first_over_tenth": first_over_tenth([result["first_s"] for result in results]),
        "memory_over_two_slots": memory_bytes / (2 * state_bytes),
        "memory_over_state": memory_bytes / results[0]["bytes"],
    }


def peer_figures(name: str, results: list[dict[str, Any]]) -> dict[str, float]:
    state_bytes = sum(result["bytes"] for result in results)
    saves_s = [result["saves_s"][name] for result in results]
    all_s = [time_s for own_s in saves_s for time_s in own_s]
    return {
        **cost(name, results, "call_s"),
        "copy_over_memcpy": copy_s(results) / median(all_s),
        "copy_gb_per_s": results[0]["bytes"] / median(all_s) / 1e9,
        "first_over_tenth": first_over_tenth(saves_s),
        "memory_over_two_slots": sum(r["peer_bytes"][name] for r in results) / (2 * state_bytes),
        "memory_over_state": sum(r["peer_bytes"][name] for r in results) / results[0]["bytes"],
    }


def report(
    figures: dict[str, float],
    peers: dict[str, dict[str, float]],
    results: list[dict[str, Any]],
    args: argparse.Namespace,
) -> None:
    columns = {"ftrun": figures, **peers}
    forms = {
        "blocked_ms": "{:.1f}",
        "blocked_ms_max": "{:.1f}",
        "boundary_ms": "{:.1f}",
        "added_ms": "{:.1f}",
        "added_over_copy": "{:.2f}",
        "step_overhead": "{:.1%}",
        "copy_gb_per_s": "{:.2f}",
        "copy_over_memcpy": "{:.2f}",
        "first_over_tenth": "{:.2f}",
        "memory_over_two_slots": "{:.3f}",
        "memory_over_state": "{:.3f}",
    }
    plain_s = median(pooled(results, "plain", "step_s"))
    where = "" if args.device == "cpu" else f" on the {args.device} device"
    bench.show_table(
        f"A snapshot at every step, {args.mb:g} MB on each of {args.ranks} ranks{where}"
        f"{', equal on all' if args.replicated else ''}",
        ["", *columns],
        [
            [key, *(form.format(column[key]) for column in columns.values())]
            for key, form in forms.items()
        ],
    )
    memcpy_s = copy_s(results)
    forward_s = median(result["forward_backward_s"] for result in results)
    skipped = sum(result["skipped"] for result in results)
    discarded = sum(result["discarded"] for result in results)
    print(
        f"\n  step without snapshots {1e3 * plain_s:.0f} ms, forward and backward "
        f"{1e3 * forward_s:.0f} ms ({forward_s / memcpy_s:.1f} copies); warm copy_ "
        f"{1e3 * memcpy_s:.0f} ms, {results[0]['copied_bytes'] / memcpy_s / 1e9:.2f} GB/s; "
        f"snapshots skipped: {skipped}, discarded: {discarded}\n  ftrun's first snapshot: "
        f"{1e3 * max(result['first_s'][0] for result in results):.0f} ms to its seal, "
        f"{1e3 * max(result['first_blocked_s'][0] for result in results):.0f} ms of them blocked"
    )
    for note in {result["note"] for result in results if result["note"]}:
        print(f"  NOTE of a rank: {note}")
    bench.finish(
        args.json,
        {
            **figures,
            "peers": peers,
            "plain_step_s": bench.spread(pooled(results, "plain", "step_s")),
            "ftrun_step_s": bench.spread(pooled(results, "ftrun", "step_s")),
            "memcpy_gb_per_s": results[0]["copied_bytes"] / memcpy_s / 1e9,
            "first_blocked_ms": 1e3 * max(result["first_blocked_s"][0] for result in results),
            "forward_backward_over_copy": forward_s / memcpy_s,
            "skipped": skipped,
            "discarded": discarded,
            "mb": args.mb,
            "ranks": args.ranks,
            "is_replicated": args.replicated,
            "device": args.device,
        },
    )


def parse_arguments() -> argparse.Namespace:
    parser = bench.Parser(__doc__, timeout_s=1200)
    parser.option("--mb", float, 512, "MB of state per rank")
    parser.option("--times-copy", float, 4, "time of forward and backward, in times of a copy")
    parser.option("--rounds", int, 4, "number of turns of all kinds")
    parser.option("--block", int, 5, "steps of one kind in a turn")
    parser.add_argument("--no-peers", action="store_true", help="measure ftrun alone")
    parser.add_argument(
        "--replicated", action="store_true", help="ranks with equal state; measures ftrun alone"
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "fake"),
        default="cpu",
        help="where the state is; on a device ftrun is measured alone (default %(default)s)",
    )
    args = parser.parsed("mb", "times_copy", "rounds", "block")
    args.ranks = REPLICATED_RANKS if args.replicated else RANKS
    args.no_peers |= args.replicated or args.device != "cpu"
    return args


if __name__ == "__main__":
    bench.run_bench(main)
