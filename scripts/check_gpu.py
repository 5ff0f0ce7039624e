#!/usr/bin/env python3
"""Check that a training on one GPU survives kill -9 bit for bit, and measure protection there.

    python scripts/check_gpu.py --json gpu.json

Needs a GPU and torch with CUDA; no network, no root; at most 9 minutes. Prints a line for each
check, the important ones first, and exits with 1 if a required figure is missed. Each check has a
time limit. `--device cpu` runs the checks that need no GPU, to test the script. `--two` prints how
to check two GPUs.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

from bench_common import BenchError, conditions, parser_of, run_bench, scratch, show_conditions
from check_gpu_exact import exact
from check_gpu_figures import conformance, cost, nvml, rates
from check_gpu_processes import memory, respawn, standby
from check_gpu_runs import Check, Figures

TOTAL_S = 530.0
LIMITS_S = {
    "exact": 150.0,
    "standby": 40.0,
    "memory": 75.0,
    "respawn": 90.0,
    "conformance": 20.0,
    "cost-2": 45.0,
    "cost-8": 60.0,
    "rates": 30.0,
    "nvml": 20.0,
}
"""In the order of the checks; their sum is `TOTAL_S`."""

TWO_GPUS = """Two GPUs: on a machine with two free GPUs, from this checkout,
  1. ftrun --nproc-per-node 2 scripts/train_gpt.py        DDP over NCCL
  2. kill -9 a rank: both ranks restart on the newest snapshot within 5 s
  3. kill -STOP a rank: ftrun status names it as the culprit of a hang
This script does not run these, and says so in its result."""


def checks_of(args: argparse.Namespace) -> dict[str, Callable[[Check], Figures]]:
    is_gpu = args.device == "cuda"
    checks: dict[str, Callable[[Check], Figures]] = {
        "exact": exact,
        "standby": standby,
        "memory": memory,
        "respawn": respawn,
        "conformance": conformance,
        "cost-2": partial(cost, 2.0 if is_gpu else 0.05, 20 if is_gpu else 3),
        "cost-8": partial(cost, 8.0 if is_gpu else 0.1, 6 if is_gpu else 3),
        "rates": rates,
        "nvml": nvml,
    }
    names = args.checks.split(",") if args.checks else checks
    return {name: checks[name] for name in names}


def main() -> int:
    args = parse_arguments()
    found, started_s = conditions(), time.monotonic()
    figures: dict[str, Figures] = {}
    with scratch() as folder:
        for name, check in checks_of(args).items():
            start_s = time.monotonic()
            left_s = args.timeout - (start_s - started_s)
            limit_s = min(left_s, LIMITS_S[name] * args.timeout / TOTAL_S)
            figures[name] = checked(check, Check(args, folder / name, limit_s))
            show(name, figures[name], time.monotonic() - start_s)
            if args.json is not None:
                everything = {"conditions": found, "checks": figures}
                args.json.write_text(json.dumps(everything, indent=1) + "\n")
    if args.two:
        print(TWO_GPUS)
        figures["two"] = {"ok": None, "shown": {"not run": "needs two GPUs, and is done by hand"}}
        show("two", figures["two"], 0.0)
    show_conditions(found)
    print(f"  {time.monotonic() - started_s:.0f} s in all")
    return 1 if any(one["ok"] is False for one in figures.values()) else 0


def checked(run: Callable[[Check], Figures], check: Check) -> Figures:
    check.folder.mkdir(parents=True, exist_ok=True)
    try:
        return run(check)
    except (BenchError, OSError, LookupError, ValueError) as error:
        return {"ok": False, "shown": {"failed": f"{type(error).__name__}: {error}"}}


def show(name: str, one: Figures, took_s: float) -> None:
    text = "; ".join(f"{key} {value}" for key, value in one["shown"].items())
    verdict = {True: "ok     ", False: "MISSED ", None: "not run"}[one["ok"]]
    print(f"{verdict} {name}, {took_s:.0f} s: {text}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, timeout_s=TOTAL_S)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--checks", default="", help="only these, such as exact,standby")
    parser.add_argument("--variants", default="", help="only these variants of the check exact")
    parser.add_argument("--two", action="store_true", help="print how to check two GPUs")
    return parser.parse_args()


if __name__ == "__main__":
    run_bench(main)
