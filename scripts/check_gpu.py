#!/usr/bin/env python3
"""Check that a training on one GPU survives kill -9 bit for bit, and measure protection there.

    python scripts/check_gpu.py --json gpu.json

Needs a GPU and torch with CUDA; no network, no root; at most 5 minutes. Prints a line for each
check, the important ones first, and exits with 1 if a required figure is missed. `--device cpu`
runs the checks that need no GPU, to test the script.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from bench_common import (
    BenchError,
    Deadline,
    NotesReader,
    conditions,
    ftrun_command,
    ftrun_status,
    launched,
    parser_of,
    pause,
    read_journal,
    run_bench,
    scratch,
    show_conditions,
    wait_for,
    write_json,
)

WORKER = Path(__file__).with_name("check_gpu_worker.py")
VARIANTS = (
    *("compile", "adamw", "adamw-plain", "adamw-fused", "sgd", "amp", "dropout", "channels-last"),
    "accumulate",
)
ON_A_GPU = ("own-stream", "step-stream", "capturable", "graph", "graph-update", "nccl")
AT_ONCE = max(1, (os.cpu_count() or 1) // 2)
LIMIT_S, KILLS, STEPS_BEFORE = 110.0, 3, 30
RESPAWN_S, BOUNDARY_S = 5.0, 0.005
"""Required: from a kill to the end of the next step; the median boundary on the host."""

Figures = dict[str, Any]
Lines = list[dict[str, Any]]


class Check:
    """One check: its folder, and how it starts processes there."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder

    def run_id(self, part: str = "") -> str:
        return f"{self.folder.name}{part}-{os.getpid()}"

    def plain(self, what: str, *more: object, part: str = "") -> list[object]:
        folder = self.folder / part
        folder.mkdir(parents=True, exist_ok=True)
        words = [WORKER, what, "--folder", folder, "--device", self.args.device]
        return [sys.executable, *words, *more]

    def ftrun(self, what: str, *more: object, part: str = "", ranks: int = 1) -> list[object]:
        flags = ["--nproc-per-node", ranks, "--run-id", self.run_id(part), "--snapshot-every", 1]
        return [*ftrun_command(*flags), *self.plain(what, *more, part=part)[1:]]

    def run(self, command: Sequence[object], part: str = "") -> str:
        """Run a command to its end; empty, or its last output if it failed."""
        folder = self.folder / part
        variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/c"}
        with launched("check", command, folder, **variables) as launcher:
            try:
                code: object = launcher.process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                code = f"none after {LIMIT_S:.0f} s"
            return f"exit code {code}: {launcher.last_output()[-700:]}" if code else ""

    def lines(self, kind: str | None = None, part: str = "", rank: int = 0) -> Lines:
        lines = NotesReader(self.folder / part / f"rank{rank}.jsonl").read()
        return [line for line in lines if kind in (None, line["kind"])]


def exact(check: Check) -> Figures:
    """Kill at step 7 of 12, and compare all state with that of an undisturbed run."""
    names = [*VARIANTS, *(ON_A_GPU if check.args.device == "cuda" else ())]
    names = check.args.variants.split(",") if check.args.variants else names
    shares = [names[at::3] for at in range(3) if names[at::3]]
    commands = {name: check.ftrun("exact", "--variants", name, part=name) for name in names}
    for part, killed in (("pair", 9), ("killed-pair", 1)):
        words = ("exact", "--variants", "gloo", "--kill-rank", killed)
        commands[part] = check.ftrun(*words, part=part, ranks=2)
    for at, share in enumerate(shares):
        words = ("reference", "--variants", ",".join(share))
        commands[f"plain{at}"] = check.plain(*words, part=f"plain{at}")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        started = {part: pool.submit(check.run, one, part) for part, one in commands.items()}
        errors = {part: one.result() for part, one in started.items()}
    wanted: dict[str, dict[int, dict[str, str]]] = {name: {} for name in [*names, "rank0", "rank1"]}
    for line in [line for at in range(len(shares)) for line in check.lines(part=f"plain{at}")]:
        wanted[line["variant"]][line.get("step", -1)] = line["state"]
    found = {name: judged(check.lines(part=name), wanted[name], errors[name]) for name in names}
    for rank in (0, 1):
        name, error = f"rank{rank}", errors["pair"] + errors["killed-pair"]
        wanted[name] = {
            line.get("step", -1): line["state"] for line in check.lines("end", "pair", rank)
        }
        found[f"gloo {name}"] = judged(check.lines(None, "killed-pair", rank), wanted[name], error)
    bad = {name: one for name, one in found.items() if one["result"] != "equal"}
    text = "".join(f"\n    {name}: {one}" for name, one in bad.items())
    shown = {"equal": f"{len(found) - len(bad)} of {len(found)}{text}"}
    return {"ok": not bad, "shown": shown, "variants": found, "errors": errors}


def judged(lines: Lines, wanted: dict[int, dict[str, str]], error: str) -> Figures:
    started, end = ([line for line in lines if line["kind"] == kind] for kind in ("begun", "end"))
    if error or not end or -1 not in wanted:
        return {"result": f"failed: {error or 'nothing to compare with'}"}
    facts = {key: end[-1][key] for key in ("note", "SEALED_COUNT", "DISCARDED_COUNT")}
    wrong = differing(end[-1]["state"], wanted[-1])
    step = started[-1]["step"] if started else 0
    if not step:
        return {"result": "nothing restored", "wrong": wrong, **facts}
    at_restore = differing(started[-1]["state"], wanted.get(step, started[-1]["state"]))
    result = "not equal" if wrong or at_restore else "equal"
    return {"result": result, "restored": step, "wrong": wrong, "at_restore": at_restore, **facts}


def differing(one: dict[str, str], two: dict[str, str]) -> list[str]:
    return sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))


def standby(check: Check) -> Figures:
    """Neither the zygote nor a standby uses the device."""
    before, found = memory_mib(), dict[str, Figures]()
    with launched("idle", check.ftrun("idle", "--seconds", 60), check.folder) as one:

        def are_there() -> bool:
            for child in psutil.Process(one.process.pid).children(recursive=True):
                found.update(facts_of(child))
            return {"ftrun-zygote", "ftrun-standby"} <= found.keys()

        wait_for("a standby", are_there, [one], Deadline(LIMIT_S))
        pause(2.0, [one], Deadline(10))
        are_there()
        used = memory_mib() - before
    ok = used == 0 and not any(facts["device_files"] for facts in found.values())
    return {"ok": ok, "shown": {**found, "added_mib": used}}


def facts_of(process: psutil.Process) -> dict[str, Figures]:
    folder = Path(f"/proc/{process.pid}")
    try:
        name = (folder / "comm").read_text().strip()
        files = [os.readlink(one) for one in (folder / "fd").iterdir()]
        num_devices = sum(one.startswith("/dev/nvidia") for one in files)
        facts = {"device_files": num_devices, "threads": process.num_threads()}
        has_driver = "libcuda.so" in (folder / "maps").read_text()
    except (OSError, psutil.Error):
        return {}
    is_shown = name in ("ftrun-zygote", "ftrun-standby")
    return {name: {**facts, "libcuda": has_driver}} if is_shown else {}


def memory_mib() -> int:
    """Memory in use on the first GPU; 0 without one."""
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return 0


def respawn(check: Check) -> Figures:
    """One rank over NCCL: time from a kill to the next step, then flight recorder and status."""
    deadline, reader = Deadline(LIMIT_S), NotesReader(check.folder / "rank0.jsonl")
    before, killed, killed_ns = memory_mib(), -1, 0
    shown: Figures = {"kill_to_step_s": [], "used_mib": []}

    def steps() -> Lines:
        """Of the newest generation after the last kill."""
        lines = [line for line in reader.of("step") if line["generation"] > killed]
        return [line for line in lines if line["generation"] == lines[-1]["generation"]]

    with launched("respawn", check.ftrun("respawn"), check.folder) as one:
        for count in range(KILLS + 1):
            wait_for("steps", lambda: len(steps()) >= STEPS_BEFORE, [one], deadline)
            if count:
                shown["kill_to_step_s"].append(round((steps()[0]["ns"] - killed_ns) / 1e9, 2))
            pause(2.5, [one], deadline)
            shown["used_mib"].append(memory_mib() - before)
            if count < KILLS:
                killed, killed_ns = steps()[0]["generation"], time.monotonic_ns()
                os.kill(reader.of("begun", killed)[-1]["pid"], signal.SIGKILL)
        status = ftrun_status(check.run_id())
        (check.folder / "facts").touch()
        wait_for("the recorder", lambda: bool(reader.of("facts")), [one], deadline)
        lines = read_journal(check.folder, check.run_id())
    phases = [line["phases_s"] for line in lines if line["kind"].lower() == "recovered"]
    shown["phases_s"] = {k: round(statistics.median(p[k] for p in phases), 3) for k in phases[0]}
    pause(1.0, [], deadline)
    shown["left_mib"] = memory_mib() - before
    shown["status"] = [(rank["step"], rank["start"]) for rank in status["ranks"]]
    shown["unprotected"] = status["snapshots"]["unprotected_reason"]
    shown |= reader.of("facts")[0]["found"]
    ok = max(shown["kill_to_step_s"]) <= RESPAWN_S and all(step for step, _ in shown["status"])
    return {"ok": ok and not shown["unprotected"], "shown": shown, "phases": phases}


def cost(gb: float, rounds: int, check: Check) -> Figures:
    """Snapshots and the restore of a large state."""
    error = check.run(check.ftrun("cost", "--gb", gb, "--rounds", rounds))
    if error or not check.lines("restored"):
        return {"ok": False, "shown": {"failed": error}}
    found = check.lines("cost")[0] | check.lines("restored")[0]
    shown = {
        "gb": found["bytes"] / 1e9,
        "gb_per_s": found["bytes"] / 1e9 / statistics.median(found["idle"]),
        "boundary_p50_ms": 1e3 * statistics.median(found["call"]),
        "boundary_p95_ms": 1e3 * sorted(found["call"])[int(0.95 * len(found["call"]))],
        "boundary_of_a_busy_device_ms": 1e3 * statistics.median(found["ahead"]),
        "step_s": statistics.median(found["without"]),
        "step_with_snapshot_s": statistics.median(found["with"]),
        **{key: found[key] for key in ("first_s", "restore_s", "first_step_s")},
    }
    ok = shown["boundary_p50_ms"] <= 1e3 * BOUNDARY_S
    return {"ok": ok, "shown": {k: round(v, 3) for k, v in shown.items()}, **found}


def rates(check: Check) -> Figures:
    """Plain copies, for comparison."""
    error = check.run(check.plain("rates"))
    shown = check.lines("rates")[0]["found"] if not error else {"failed": error}
    return {"ok": not error, "shown": shown}


def main() -> int:
    args = parse_arguments()
    found, started_s, is_gpu = conditions(), time.monotonic(), args.device == "cuda"
    checks: dict[str, Callable[[Check], Figures]] = {
        "exact": exact,
        "standby": standby,
        "respawn": respawn,
        "cost-2": partial(cost, 2.0 if is_gpu else 0.05, 20 if is_gpu else 3),
        "cost-8": partial(cost, 8.0 if is_gpu else 0.1, 6 if is_gpu else 3),
        "rates": rates,
    }
    figures: dict[str, Figures] = {}
    with scratch() as folder:
        for name in args.checks.split(",") if args.checks else checks:
            start_s = time.monotonic()
            try:
                one = checks[name](Check(args, folder / name))
            except (BenchError, OSError, LookupError, ValueError) as error:
                one = {"ok": False, "shown": {"failed": f"{type(error).__name__}: {error}"}}
            figures[name] = one
            text = "; ".join(f"{key} {value}" for key, value in one["shown"].items())
            verdict = "ok    " if one["ok"] else "MISSED"
            print(f"{verdict} {name}, {time.monotonic() - start_s:.0f} s: {text}", flush=True)
            write_json(args.json, {"conditions": found, "checks": figures})
    show_conditions(found)
    print(f"  {time.monotonic() - started_s:.0f} s in all")
    return 0 if all(one["ok"] for one in figures.values()) else 1


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, timeout_s=300)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--checks", default="", help="only these, such as exact,standby")
    parser.add_argument("--variants", default="", help="only these variants of the check exact")
    return parser.parse_args()


if __name__ == "__main__":
    run_bench(main)
