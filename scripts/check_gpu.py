#!/usr/bin/env python3
"""Check that a training on one GPU survives kill -9 bit for bit, and measure protection there.

    python scripts/check_gpu.py --json gpu.json

Needs a GPU and torch with CUDA; no network, no root; at most 9 minutes. Prints a line for each
check, the important ones first, and exits with 1 if a required figure is missed. Each check has a
time limit, and FILE is written after each. `--device fake` runs all of them on the device of the
tests, and `--device cpu` those that need no device, to test the script; figures are required of a
GPU only.
"""

import argparse
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import bench_common as bench
from check_gpu_exact import exact
from check_gpu_figures import auto, collectives, conformance, cost, nvml, rates, ring
from check_gpu_processes import memory, respawn, standby, two
from check_gpu_runs import STOP_S, Check, Figures

TOTAL_S = 510.0
LIMITS_S = {
    "exact": 150.0,
    "standby": 40.0,
    "memory": 75.0,
    "respawn": 90.0,
    "respawn-bound": 60.0,
    "conformance": 45.0,
    "cost-2": 60.0,
    "ring": 75.0,
    "cost-8": 75.0,
    "auto": 75.0,
    "collectives": 40.0,
    "two": 110.0,
    "rates": 30.0,
    "nvml": 20.0,
}
"""In the order of the checks. Their sum is above `TOTAL_S`, because few checks need all of it. The
last one that runs has `STOP_S` in addition."""


def checks_of(args: argparse.Namespace) -> dict[str, Callable[[Check], Figures]]:
    is_gpu = args.device == "cuda"
    checks: dict[str, Callable[[Check], Figures]] = {
        "exact": exact,
        "standby": standby,
        "memory": memory,
        "respawn": respawn,
        "respawn-bound": partial(respawn, bound=True),
        "conformance": conformance,
        "cost-2": partial(cost, 2.0 if is_gpu else 0.05, 20 if is_gpu else 3),
        "ring": partial(ring, 8.0 if is_gpu else 0.02),
        "cost-8": partial(cost, 8.0 if is_gpu else 0.1, 6 if is_gpu else 3),
        "auto": partial(auto, 2.0 if is_gpu else 0.02, 2 if is_gpu else 1),
        "collectives": collectives,
        "two": two,
        "rates": rates,
        "nvml": nvml,
    }
    default = [name for name in checks if name != "two" or args.two]
    names = args.checks.split(",") if args.checks else default
    return {name: checks[name] for name in names}


def main() -> int:
    args = parse_arguments()
    found, started_s = bench.conditions(), time.monotonic()
    if args.device == "cuda" and found["gpu"] is None:
        raise bench.BenchError("torch finds no GPU here: its build or the driver is missing")
    if args.device == "fake":
        words = [str(bench.ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, words))
    figures: dict[str, Figures] = {}
    with bench.scratch() as folder:
        for name, check in checks_of(args).items():
            start_s = time.monotonic()
            left_s = args.timeout - (start_s - started_s)
            limit_s = min(left_s, LIMITS_S[name] * args.timeout / TOTAL_S)
            figures[name] = checked(check, Check(args, folder / name, limit_s))
            if figures[name]["ok"] is False:
                figures[name]["outputs"] = last_outputs(folder / name)
            show(name, figures[name], time.monotonic() - start_s)
            write(args.json, {"conditions": found, "checks": figures})
    bench.show_conditions()
    print(f"  {time.monotonic() - started_s:.0f} s in all")
    return 1 if any(one["ok"] is False for one in figures.values()) else 0


def checked(run: Callable[[Check], Figures], check: Check) -> Figures:
    """The figures of a check; an error in it, or no end, is one of them."""
    check.folder.mkdir(parents=True, exist_ok=True)
    try:
        with interrupted_after(check.limit_s + STOP_S):
            return run(check)
    except Exception as error:  # noqa: BLE001 - the other checks continue
        text = f"{type(error).__name__}: {error}"
        return {"ok": False, "shown": {"failed": text}, "traceback": traceback.format_exc()}


@contextmanager
def interrupted_after(limit_s: float) -> Iterator[None]:
    """Raise TimeoutError in the block after this time, whatever it waits for."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"no end after {limit_s:.0f} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, max(limit_s, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def last_outputs(folder: Path) -> dict[str, str]:
    paths = sorted(folder.rglob("*.output"))
    return {
        str(path.relative_to(folder)): path.read_text("utf-8", "replace")[-3000:] for path in paths
    }


def write(path: Path | None, figures: dict[str, Any]) -> None:
    """Replace the file, so that it is whole whenever this script is killed."""
    if path is not None:
        made = path.with_name(f"{path.name}.new")
        made.write_text(json.dumps(figures, indent=1, default=str) + "\n")
        made.replace(path)


def show(name: str, one: Figures, took_s: float) -> None:
    text = "; ".join(f"{key} {value}" for key, value in one["shown"].items())
    verdict = {True: "ok     ", False: "MISSED ", None: "not run"}[one["ok"]]
    print(f"{verdict} {name}, {took_s:.0f} s: {text}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = bench.Parser(__doc__, timeout_s=TOTAL_S)
    parser.add_argument("--device", choices=["cuda", "fake", "cpu"], default="cuda")
    parser.add_argument("--checks", default="", help="only these, such as exact,standby")
    parser.add_argument("--variants", default="", help="only these variants of the check exact")
    parser.add_argument(
        "--two", action="store_true", help="also hangs of two ranks, on two GPUs: the check two"
    )
    parser.add_argument(
        "--provoke-xid",
        action="store_true",
        help="in the check nvml, a process makes an illegal access: only on a machine of your own, "
        "because the driver logs an error of the GPU",
    )
    return parser.parsed()


if __name__ == "__main__":
    bench.run_bench(main)
