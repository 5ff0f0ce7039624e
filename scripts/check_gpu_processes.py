"""Processes: standbys, respawns, what is left of a killed rank, and hangs of two ranks."""

import math
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bench_common as bench
import psutil
import torch
from check_gpu_collectives import cases_of
from check_gpu_runs import Check, Figures, Lines

IDLE_NAMES = ("ftrun-zygote", "ftrun-standby")
STEPS_BEFORE = 30
COLD_S, BOUND_S = 5.0, 2.5
"""Required: from a kill to the end of the next step, without and with a bound standby."""

RECORDED_FIELDS = frozenset({
    "record_id", "pg_id", "process_group", "collective_seq_id", "p2p_seq_id", "op_id",
    "profiling_name", "time_created_ns", "input_sizes", "output_sizes", "state", "retired",
    "time_discovered_started_ns", "time_discovered_completed_ns", "timeout_ms", "is_p2p",
})  # fmt: skip
"""Required of an entry of the flight recorder, because ftrun reads them."""

SAFE = ("nothing", "fr_trace_json", "dump_nccl_trace_json?includecollectives=false")
"""Required: requests that ftrun makes during a capture do not end it."""

HANG_SETTINGS = ("hang.suspect_after_s=3", "hang.no_activity_s=1", "hang.kill_after_s=8")
CULPRIT = 1

MEMORY_S = 5.0
"""Required: from a kill until the device memory is free."""

LEFT_MIB = 64
"""The driver's own use varies by less."""


def standby(check: Check) -> Figures:
    """Neither the zygote nor a standby uses the device, and ranks are forked from them."""
    before, found = memory_mib(), dict[str, Figures]()
    command = check.ftrun("idle", "--seconds", 600)
    with bench.launched("idle", command, check.folder, check.deadline) as one:

        def are_there() -> bool:
            for child in psutil.Process(one.process.pid).children(recursive=True):
                found.update(facts_of(child))
            return found.keys() >= set(IDLE_NAMES)

        one.wait_for("a standby", are_there)
        one.pause(2.0)
        are_there()
        used = memory_mib() - before
    fresh = [line["reason"] for line in journal(check, "fresh_start_used")]
    are_idle = all(facts["threads"] == 1 and not facts["device_files"] for facts in found.values())
    shown = {**found, "added_mib": used, "fresh_starts": fresh}
    return {"ok": are_idle and not fresh and used <= 0, "shown": shown}


def facts_of(process: psutil.Process) -> dict[str, Figures]:
    folder = Path(f"/proc/{process.pid}")
    try:
        name = (folder / "comm").read_text().strip()
        files = [os.readlink(one) for one in (folder / "fd").iterdir()]
        files = [one for one in files if one.startswith(("/dev/nvidia", "/dev/infiniband/"))]
        facts = {"device_files": files, "threads": process.num_threads()}
        has_driver = "libcuda.so" in (folder / "maps").read_text()
    except (OSError, psutil.Error):
        return {}
    return {name: {**facts, "libcuda": has_driver}} if name in IDLE_NAMES else {}


def memory_mib() -> int:
    """Memory in use on the first GPU; 0 without one."""
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=20)
        return int(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0


def respawn(check: Check, *, bound: bool = False) -> Figures:
    """One rank over NCCL: time from a kill to the next step, then flight recorder and status.

    Args:
        check: its folder and limits.
        bound: with standbys that have initialised the device.
    """
    reader = bench.NotesReader(check.folder / "rank0.jsonl")
    num_kills = (5 if bound else 10) if check.is_gpu else 2
    before, status, failed = memory_mib(), dict[str, Any](), ""
    shown: Figures = {"kill_to_step_s": [], "used_mib": []}
    command = check.ftrun("respawn", settings=["start.device=context"] if bound else [])

    def is_ready(num_killed: int) -> bool:
        return not bound or len(journal(check, "standby_bound")) > num_killed

    with bench.launched("respawn", command, check.folder, check.deadline) as one:
        try:
            kill_ranks(num_kills, reader, shown, one, before, is_ready=is_ready)
            status = bench.ftrun_status(check.run_id())
            (check.folder / "facts").touch()
            one.wait_for("the recorder", lambda: bool(reader.of("facts")))
        except bench.BenchError as error:
            failed = str(error)
    phases = [line["phases_s"] for line in journal(check, "recovered")]
    if bound:
        shown["dropped"] = [line["reason"] for line in journal(check, "standby_dropped")]
    names = list(dict.fromkeys(name for one in phases for name in one))
    shown["phases_s"] = {
        name: round(statistics.median(one.get(name, 0.0) for one in phases), 3) for name in names
    }
    time.sleep(1.0)
    shown["left_mib"] = memory_mib() - before
    shown["status"] = [(rank["step"], rank["start"]) for rank in status.get("ranks", [])]
    shown["unprotected"] = status.get("snapshots", {}).get("unprotected_reason", "no status")
    shown |= check.found("facts") | ({"failed": failed} if failed else {})
    times_s = shown["kill_to_step_s"]
    ok = len(times_s) == num_kills and not failed and not shown.get("dropped")
    ok &= not shown["unprotected"] and all(step for step, _ in shown["status"])
    missed = missed_by_respawn(shown, BOUND_S if bound else COLD_S) if check.is_gpu else []
    shown |= {"missed": "; ".join(missed)} if missed else {}
    return {"ok": ok and not missed, "shown": shown, "phases": phases}


def missed_by_respawn(shown: Figures, limit_s: float) -> list[str]:
    """What is required of a GPU and missed: times, fields of the recorder, captures; in words."""
    missed, longest_s = [], max(shown["kill_to_step_s"], default=math.inf)
    if longest_s > limit_s:
        missed.append(f"a kill to the next step takes {longest_s:g} s, more than {limit_s:g} s")
    handlers = shown.get("handlers", ())
    newest = [entry for name in handlers for entry in shown.get(name, {}).get("newest", ())]
    lacking = sorted({key for one in newest for key in RECORDED_FIELDS - one.keys()})
    if lacking or not newest:
        missed.append(f"fields of the recorder: {', '.join(lacking) or 'no entry'}")
    for request in SAFE:
        is_made = request == "nothing" or request.partition("?")[0] in handlers
        if is_made and (found := shown.get(f"capture during {request}")) != "intact":
            missed.append(f"a capture during {request}: {found}")
    return missed


def kill_ranks(
    num_kills: int,
    reader: bench.NotesReader,
    shown: Figures,
    launcher: bench.Launcher,
    before_mib: int,
    *,
    is_ready: Callable[[int], bool],
) -> None:
    """Kill the rank several times, each time after steps of its newest generation.

    Args:
        num_kills: how often.
        reader: of the notes of the rank.
        shown: gets the times, and the memory in use before each kill.
        launcher: of the run.
        before_mib: memory in use before the run.
        is_ready: whether the rank may be killed after this number of kills.
    """
    killed, killed_ns = -1, 0

    def steps() -> Lines:
        lines = [line for line in reader.of("step") if line["generation"] > killed]
        return [line for line in lines if line["generation"] == lines[-1]["generation"]]

    for count in range(num_kills + 1):
        launcher.wait_for("steps", lambda: len(steps()) >= STEPS_BEFORE)
        if count:
            shown["kill_to_step_s"].append(round((steps()[0]["ns"] - killed_ns) / 1e9, 2))
        launcher.pause(1.0)
        launcher.wait_for("a standby", partial(is_ready, count))
        shown["used_mib"].append(memory_mib() - before_mib)
        if count < num_kills:
            killed, killed_ns = steps()[0]["generation"], time.monotonic_ns()
            os.kill(reader.of("begun", killed)[-1]["pid"], signal.SIGKILL)


def journal(check: Check, kind: str) -> Lines:
    lines = bench.read_journal(check.folder, check.run_id())
    return [line for line in lines if line["kind"] == kind]


def two(check: Check) -> Figures:
    """Two ranks hang in several ways, one after the other; each time ftrun names rank 1."""
    count = torch.cuda.device_count() if check.is_gpu else 2
    if count < 2:
        return {"ok": None, "shown": {"not run": f"needs two GPUs, and {count} is here"}}
    cases = cases_of(check.args.device)
    words = ("two", "--variants", ",".join(cases))
    error = check.run(check.ftrun(*words, ranks=2, settings=HANG_SETTINGS))
    closed = [line for line in journal(check, "incident_closed") if line["generations"]]
    verdicts = {one["incident"]: one["verdict"] for one in journal(check, "verdict")}
    shown = {}
    for case, line in zip(cases, closed, strict=False):
        shown[case] = {key: line[key] for key in ("culprits", "detected_s", "recovered_s")}
        shown[case] |= {"kind": line["verdict_kind"], "restored": line["restored"]}
    are_named = [one["culprits"] == [CULPRIT] for one in shown.values()]
    ok = not error and len(are_named) == len(cases) and all(are_named)
    shown |= {"failed": error} if error else {}
    return {"ok": ok, "shown": shown, "verdicts": verdicts}


def memory(check: Check) -> Figures:
    """A rank with most of the device memory dies; its children in own sessions sleep on."""
    reader = bench.NotesReader(check.folder / "rank0.jsonl")
    before = memory_mib()

    def begun(generation: int) -> bool:
        return bool(reader.of("step", generation))

    command = check.ftrun("memory")
    with bench.launched("memory", command, check.folder, check.deadline) as one:
        one.wait_for("the first generation", lambda: begun(0))
        rank = reader.of("begun", 0)[0]
        used = memory_mib() - before
        os.kill(rank["pid"], signal.SIGKILL)
        one.wait_for("the next generation", lambda: begun(1))
        one.wait_for("its record", lambda: bool(journal(check, "recovered")))
        output = one.output.read_text()
    phases = journal(check, "recovered")[0]["phases_s"]
    left_mib, end_s = memory_mib() - before, time.monotonic() + MEMORY_S
    while left_mib > LEFT_MIB and time.monotonic() < end_s:
        time.sleep(0.05)
        left_mib = memory_mib() - before
    next_rank = reader.of("begun", 1)[0]
    waited_s = phases["stop"] + phases.get("device_memory", 0.0)
    shown = {
        "state_gb": round(rank["bytes"] / 1e9, 1),
        "used_mib": used,
        "stop_and_memory_s": round(waited_s, 3),
        "children_before": len(rank["children"]),
        "children_left": next_rank["left"],
        "left_mib": left_mib,
    }
    is_same = next_rank["bytes"] == rank["bytes"] and len(rank["children"]) == 2
    is_free = waited_s <= MEMORY_S and left_mib <= LEFT_MIB and "is not free after" not in output
    return {"ok": is_same and is_free and not next_rank["left"], "shown": shown, "phases": phases}
