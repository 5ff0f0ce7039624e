#!/usr/bin/env python3
"""Measure how fast other ranks restore a saved state, compared with dcp.load; and the same ranks.

    python scripts/bench_reshard.py --gb 1 --json reshard.json

The state is FSDP2 parameters with AdamW's moments. For each change of the number of ranks, one run
saves and another restores with a new model and optimizer. One run measures the whole
`ftrun.attach`, with digests compared, from the memory of the SMP. The next run measures
get_state_dict, dcp.load of the same state from tmpfs, and set_state_dict. The time to read ftrun's
files into memory before its ranks begin is excluded, because the files of dcp.load are in memory.
`again`: the restore of a killed rank, in bytes per rank, relative to a warm copy of the same size
by all ranks at once.
"""

import json
import os
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import bench_common as bench

WORKER = Path(__file__).with_name("bench_reshard_worker.py")
CHANGES = ((2, 1), (2, 3), (4, 2))
AGAIN_RANKS = 2


def main() -> int:
    parser = bench.Parser(__doc__, timeout_s=1200)
    parser.option("--gb", float, 1.0, "GB of state of all ranks")
    parser.option("--gb-again", float, 1.0, "GB of state of each rank for `again`")
    parser.option("--rounds", int, 3, "number of turns")
    args = parser.parsed()
    changes = [change(before, after, args) for before, after in CHANGES]
    again = [restored_again(args) for _ in range(args.rounds)]
    figures: dict[str, Any] = {
        "changes": changes,
        "speedup_over_dcp_load": min(one["speedup"]["median"] for one in changes),
        "restore_over_memcpy": statistics.median(one["copy_s"] / one["attach_s"] for one in again),
        "again": again,
    }
    show(figures, args)
    bench.finish(args.json, figures)
    return 0


def change(before: int, after: int, args: Any) -> dict[str, Any]:
    with bench.scratch() as folder:
        run = partial(started, folder, gb=args.gb, deadline=args.deadline)
        run(before, "save")
        turns = [run(after, "load") | run(after, "dcp") for _ in range(args.rounds)]
    return {
        "before": before,
        "after": after,
        "attach_s": bench.spread([one["attach_s"] for one in turns]),
        "dcp_load_s": bench.spread([one["dcp_load_s"] for one in turns]),
        "speedup": bench.spread([one["dcp_load_s"] / one["attach_s"] for one in turns]),
    }


def restored_again(args: Any) -> dict[str, float]:
    gb = args.gb_again * AGAIN_RANKS
    with bench.scratch() as folder:
        return started(folder, AGAIN_RANKS, "again", gb=gb, deadline=args.deadline)


def started(
    folder: Path, ranks: int, what: str, *, gb: float, deadline: bench.Deadline
) -> dict[str, float]:
    """Run to the end; the measurements of rank 0, if it measures."""
    figures = folder / "figures.json"
    figures.unlink(missing_ok=True)
    flags = ["--nproc-per-node", ranks, "--run-id", f"bench-reshard-{os.getpid()}"]
    flags += ["--snapshot-every", 1]
    if what == "save":
        flags += ["--checkpoint-dir", folder / "checkpoints"]
    elif what == "load":
        flags += ["--resume", folder / "checkpoints"]
    words = [WORKER, what, "--gb", gb, "--folder", folder]
    command = bench.ftrun_command(*flags, *words)
    with bench.launched(f"{what}-{ranks}", command, folder, deadline) as launcher:
        launcher.wait_for_end()
    if what == "save" and not (folder / "checkpoints" / "latest").exists():
        journal = next(folder.glob("ftrun-logs/*/journal.jsonl")).read_text()
        raise bench.BenchError(f"no checkpoint of {ranks} ranks:\n{journal[-4000:]}")
    found: dict[str, float] = json.loads(figures.read_text()) if figures.exists() else {}
    return found


def show(figures: dict[str, Any], args: Any) -> None:
    forms = {"attach_s": ".2f", "dcp_load_s": ".2f", "speedup": ".1f"}
    rows = [
        (
            f"{one['before']} to {one['after']}",
            *(format(one[key]["median"], form) for key, form in forms.items()),
        )
        for one in figures["changes"]
    ]
    bench.show_table(
        f"{args.gb:g} GB restored by other ranks, in seconds",
        ("ranks", "ftrun", "dcp.load", "dcp.load / ftrun"),
        rows,
    )
    print(
        f"\n  {args.gb_again:g} GB of each of {AGAIN_RANKS} ranks again, over a warm copy: "
        f"{figures['restore_over_memcpy']:.2f}"
    )


if __name__ == "__main__":
    bench.run_bench(main)
