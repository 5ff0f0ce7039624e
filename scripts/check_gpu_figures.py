"""Costs of snapshots and of collectives, plain copies, and NVML.

What is required is required of a GPU. Each other device only has to give all figures.
"""

import math
import statistics
from collections.abc import Sequence

from check_gpu_runs import Check, Figures

BOUNDARY_S = 0.005
"""Required: the median boundary on the host."""

ADDED_S = 0.01
"""Required: what a snapshot adds to a step, at most, in addition to the time by which its copy
takes longer than the step. It includes the boundary, and what steps of 0.3 s vary by."""

SHARE_WITH_AUTO = 0.02
"""Required: the part of the time that snapshots take with `snapshot.every: auto`, at most."""

RING_GB_PER_S = 8.0
"""Required of the copies with digests, by one thread."""

TWO_OVER_ONE = 1.6
"""Required of two threads, where the rank has the cores for them."""

SUMS_S_PER_GB = 0.004
"""Required: the sums that compare ranks with equal tensors."""

SLOWER = {"matmul_4096_kib": 0.03, "small_4096_kib": 0.05}
"""Required: by which part work is slower at most during the copies."""

TIMING_US = 3.0
"""Required: what timing adds to a recorded collective, at most."""

HARMLESS_XIDS = ("XID 13", "XID 31")
"""What an illegal access may be reported as; see `ftrun.monitor.device_faults`."""

PINNED_OVER_PAGEABLE = 3.0
"""Required of copies from the device."""


def cost(gb: float, rounds: int, check: Check) -> Figures:
    error = check.run(check.ftrun("cost", "--gb", gb, "--rounds", rounds))
    found: Figures = {}
    for kind in ("cost", "restored"):
        for line in check.lines(kind):
            found |= line
    shown = {key: found[key] for key in ("first_s", "restore_s", "first_step_s") if key in found}
    if "bytes" in found:
        shown["gb"] = found["bytes"] / 1e9
    if "idle" in found:
        shown["copy_s"] = statistics.median(found["idle"])
        shown["gb_per_s"] = shown["gb"] / shown["copy_s"]
    if "without" in found:
        shown["boundary_p50_ms"] = 1e3 * statistics.median(found["call"])
        shown["boundary_p95_ms"] = 1e3 * sorted(found["call"])[int(0.95 * len(found["call"]))]
        shown["step_s"] = statistics.median(found["without"])
        shown["step_with_snapshot_s"] = statistics.median(found["with"])
    if "ahead" in found:
        shown["boundary_of_a_busy_device_ms"] = 1e3 * statistics.median(found["ahead"])
    ok = not error and {"boundary_p50_ms", "copy_s", "step_s", "restore_s"} <= shown.keys()
    missed = missed_by_cost(shown) if ok and check.is_gpu else []
    shown = {key: round(value, 3) for key, value in shown.items()} | failure(error, missed)
    return {"ok": ok and not missed, "shown": shown, **found}


def missed_by_cost(shown: Figures) -> list[str]:
    """What is required of a GPU and missed, in words."""
    missed = []
    if shown["boundary_p50_ms"] > 1e3 * BOUNDARY_S:
        missed.append(f"a boundary takes more than {1e3 * BOUNDARY_S:g} ms")
    added_s = shown["step_with_snapshot_s"] - shown["step_s"]
    allowed_s = max(0.0, shown["copy_s"] - shown["step_s"]) + ADDED_S
    if added_s > allowed_s:
        missed.append(f"a snapshot adds {added_s:.3f} s to its step, more than {allowed_s:.3f} s")
    return missed


def auto(gb: float, periods: int, check: Check) -> Figures:
    """The part of the time that snapshots take, if ftrun chooses their interval."""
    seconds = 0.1 if check.is_gpu else 0.02
    words = ("auto", "--gb", gb, "--rounds", periods, "--seconds", seconds)
    error = check.run(check.ftrun(*words, every="auto"))
    found = check.found("auto")
    shown: Figures = {}
    if "steps_s" in found:
        steps_s, quiet_s = found["steps_s"], statistics.median(found["quiet_s"])
        shown = {"steps_between_snapshots": found["every"]}
        shown["step_s"] = round(quiet_s, 4)
        shown["share_percent"] = round(100 * (statistics.mean(steps_s) / quiet_s - 1), 2)
    ok = not error and len(found.get("every", ())) >= periods
    missed = list[str]()
    if check.is_gpu and shown.get("share_percent", math.inf) > 100 * SHARE_WITH_AUTO:
        missed = [f"snapshots take more than {100 * SHARE_WITH_AUTO:g} % of the time"]
    return {"ok": ok and not missed, "shown": {**shown, **failure(error, missed)}, **found}


def ring(gb: float, check: Check) -> Figures:
    """The copies of a snapshot without a training, and work during them."""
    error = check.run(check.plain("ring", "--gb", gb))
    found = check.found("ring")
    shown: Figures = {}
    if "bytes" in found:
        shown = {"gb": found["bytes"] / 1e9, **{key: found[key] for key in ("gb_per_s", "first_s")}}
        shown = {key: round(value, 3) for key, value in shown.items()}
        shown |= {"is_pinned": found["is_pinned"], "wrong": found["wrong"]}
    if "repeatable" in found:
        numbers = {key: found[key] for key in ("one_thread_gb_per_s", "sums_s_per_gb")}
        shown |= {key: round(value, 4) for key, value in numbers.items()}
    are_right = [found.get("repeatable"), found.get("flipped_bit_found")] == [True, True]
    slower = {key: one["slower"] for key, one in found.items() if isinstance(one, dict)}
    for key, value in slower.items():
        shown[f"{key}_slower_percent"] = round(100 * value, 1)
    ok = not error and found.get("wrong") == [] and are_right and slower.keys() >= SLOWER.keys()
    missed = missed_by_ring(found, slower) if check.is_gpu else []
    return {"ok": ok and not missed, "shown": {**shown, **failure(error, missed)}, **found}


def missed_by_ring(found: Figures, slower: dict[str, float]) -> list[str]:
    """As `missed_by_cost`; it names larger pieces if those in use slow down small kernels."""
    missed = []
    one, both = found.get("one_thread_gb_per_s", 0.0), found.get("gb_per_s", 0.0)
    if one < RING_GB_PER_S:
        missed.append(f"one thread copies {one:.1f} GB/s, not {RING_GB_PER_S:g}")
    if found.get("has_two_threads") and both < TWO_OVER_ONE * one:
        missed.append(f"two threads copy {both:.1f} GB/s, not {TWO_OVER_ONE:g} times {one:.1f}")
    if found.get("sums_s_per_gb", math.inf) > SUMS_S_PER_GB:
        missed.append(f"sums take more than {1e3 * SUMS_S_PER_GB:g} ms per GB")
    for key, most in SLOWER.items():
        if slower.get(key, math.inf) > most:
            missed.append(f"{key} is more than {100 * most:g} % slower")
    if slower.get("small_4096_kib", math.inf) > SLOWER["small_4096_kib"]:
        is_enough = slower.get("small_16384_kib", math.inf) <= SLOWER["small_4096_kib"]
        missed.append("pieces of 16 MiB " + ("are enough" if is_enough else "are not enough"))
    return missed


def collectives(check: Check) -> Figures:
    """Time of the host for one all_reduce: without recorder, recorded, and recorded with timing."""
    found: Figures = {}
    for part, num_entries in (("plain", 0), ("recorded", 2000)):
        command = check.plain("collectives", part=part)
        error = check.run(command, part, TORCH_FR_BUFFER_SIZE=str(num_entries))
        found |= {f"{part}_{key}": one for key, one in check.found("collectives", part).items()}
        if error:
            return {"ok": False, "shown": {**found, "failed": error}}
    timing_us = found.get("recorded_timed_us", math.inf) - found["recorded_call_us"]
    found["timing_us"] = timing_us
    shown = {key: round(one, 2) if isinstance(one, float) else one for key, one in found.items()}
    missed = list[str]()
    if check.is_gpu and timing_us > TIMING_US:
        missed = [f"timing adds more than {TIMING_US:g} us to a collective"]
    return {"ok": not missed, "shown": {**shown, **failure("", missed)}}


def failure(error: str, missed: Sequence[str] = ()) -> Figures:
    """What to show of an error, and of required figures that are missed."""
    shown = {"failed": error} if error else {}
    return shown | {"missed": "; ".join(missed)} if missed else shown


def rates(check: Check) -> Figures:
    error = check.run(check.plain("rates"))
    shown, ratio = check.found("rates"), 0.0
    if "d2h_pinned_gb_per_s" in shown:
        ratio = shown["d2h_pinned_gb_per_s"] / max(1e-9, shown["d2h_pageable_gb_per_s"])
    ok = not error and (not check.is_gpu or ratio >= PINNED_OVER_PAGEABLE)
    return {"ok": ok, "shown": {**shown, "pinned_over_pageable": round(ratio, 2), **failure(error)}}


def nvml(check: Check) -> Figures:
    """The error events that the driver can report, the recovery action, and memory in use."""
    error = check.run(check.plain("nvml"))
    if error:
        return {"ok": False, "shown": {"failed": error}}
    shown = check.found("nvml")
    ok = bool(shown.get("used_mib")) or not check.is_gpu
    if check.args.provoke_xid:
        error = check.run(check.plain("xid", part="xid"), "xid")
        shown |= check.found("xid", "xid") | failure(error)
        reports = shown.get("reports", [])
        ok &= not error and all(any(one in text for one in HARMLESS_XIDS) for text in reports)
        ok &= not shown.get("is_fault") and (not check.is_gpu or shown["died"] != 0)
        shown["xid"] = "; ".join(reports) or "not visible here"
    return {"ok": ok, "shown": shown}


def conformance(check: Check) -> Figures:
    """What the tests assume about a device, on this device: `tests/fake_device/conformance.py`."""
    if check.args.device == "cpu":
        return {"ok": None, "shown": {"not run": "needs a device"}}
    error = check.run(check.plain("conformance"))
    found = check.found("conformance")
    begun = [line["name"] for line in check.lines("begun") if line["name"] not in found]
    bad = {name: text for name, text in found.items() if text}
    bad |= dict.fromkeys(begun, "began, and did not end")
    shown = {"as_assumed": f"{len(found) - len(bad)} of {len(found)}", **bad, **failure(error)}
    return {"ok": bool(found) and not bad and not error, "shown": shown}
