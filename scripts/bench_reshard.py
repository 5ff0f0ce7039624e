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
from pathlib import Path
from typing import Any

from bench_common import (
    BenchError,
    Deadline,
    conditions,
    ftrun_command,
    launched,
    parser_of,
    run_bench,
    scratch,
    show_conditions,
    show_table,
    spread,
    wait_for,
    write_json,
)

WORKER = Path(__file__).with_name("bench_reshard_worker.py")
CHANGES = ((2, 1), (2, 3), (4, 2))
AGAIN_RANKS = 2


def main() -> int:
    parser = parser_of(__doc__, timeout_s=1200)
    parser.add_argument(
        "--gb", type=float, default=1.0, help="GB of state of all ranks (default %(default)s)"
    )
    parser.add_argument(
        "--gb-again",
        type=float,
        default=1.0,
        help="GB of state of each rank for `again` (default %(default)s)",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="number of turns (default %(default)s)"
    )
    args = parser.parse_args()
    deadline, found = Deadline(args.timeout), conditions()
    changes = [change(before, after, args, deadline) for before, after in CHANGES]
    again = [restored_again(args, deadline) for _ in range(args.rounds)]
    figures: dict[str, Any] = {
        "changes": changes,
        "speedup_over_dcp_load": min(one["speedup"]["median"] for one in changes),
        "restore_over_memcpy": statistics.median(one["copy_s"] / one["attach_s"] for one in again),
        "again": again,
    }
    show(figures, args)
    show_conditions(found)
    write_json(args.json, {"conditions": found, **figures})
    return 0


def change(before: int, after: int, args: Any, deadline: Deadline) -> dict[str, Any]:
    """Save once, restore several times."""
    with scratch() as folder:
        started(folder, before, "save", args.gb, deadline)
        turns = [
            started(folder, after, "load", args.gb, deadline)
            | started(folder, after, "dcp", args.gb, deadline)
            for _ in range(args.rounds)
        ]
    return {
        "before": before,
        "after": after,
        "attach_s": spread([one["attach_s"] for one in turns]),
        "dcp_load_s": spread([one["dcp_load_s"] for one in turns]),
        "speedup": spread([one["dcp_load_s"] / one["attach_s"] for one in turns]),
    }


def restored_again(args: Any, deadline: Deadline) -> dict[str, float]:
    with scratch() as folder:
        return started(folder, AGAIN_RANKS, "again", args.gb_again * AGAIN_RANKS, deadline)


def started(folder: Path, ranks: int, what: str, gb: float, deadline: Deadline) -> dict[str, float]:
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
    with launched(f"{what}-{ranks}", ftrun_command(*flags, *words), folder) as launcher:
        wait_for("the end of it", lambda: launcher.process.poll() is not None, [], deadline)
        if launcher.process.returncode != 0:
            raise BenchError(f"{what} with {ranks} ranks:\n{launcher.last_output()}")
    if what == "save" and not (folder / "checkpoints" / "latest").exists():
        journal = next(folder.glob("ftrun-logs/*/journal.jsonl")).read_text()
        raise BenchError(f"no checkpoint of {ranks} ranks:\n{journal[-4000:]}")
    found: dict[str, float] = json.loads(figures.read_text()) if figures.exists() else {}
    return found


def show(figures: dict[str, Any], args: Any) -> None:
    rows = [
        (
            f"{one['before']} to {one['after']}",
            f"{one['attach_s']['median']:.2f}",
            f"{one['dcp_load_s']['median']:.2f}",
            f"{one['speedup']['median']:.1f}",
        )
        for one in figures["changes"]
    ]
    show_table(
        f"{args.gb:g} GB restored by other ranks, in seconds",
        ("ranks", "ftrun", "dcp.load", "dcp.load / ftrun"),
        rows,
    )
    print(
        f"\n  {args.gb_again:g} GB of each of {AGAIN_RANKS} ranks again, over a warm copy: "
        f"{figures['restore_over_memcpy']:.2f}"
    )


if __name__ == "__main__":
    run_bench(main)
