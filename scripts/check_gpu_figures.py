"""Costs of snapshots, plain copies, and NVML."""

import math
import statistics

from check_gpu_runs import Check, Figures

BOUNDARY_S = 0.005
"""Required: the median boundary on the host."""

RING_GB_PER_S = 8.0
"""Required of the copies with digests."""

SUMS_S_PER_GB = 0.004
"""Required: the sums that compare ranks with equal tensors."""

SLOWER = {"matmul_4096_kib": 0.03, "small_4096_kib": 0.05}
"""Required: by which part work is slower at most during the copies."""

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
    ok = not error and {"boundary_p50_ms", "restore_s"} <= shown.keys()
    ok &= not check.is_gpu or shown.get("boundary_p50_ms", math.inf) <= 1e3 * BOUNDARY_S
    shown = {key: round(value, 3) for key, value in shown.items()} | failure(error)
    return {"ok": ok, "shown": shown, **found}


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
    if check.is_gpu:
        ok &= found.get("gb_per_s", 0.0) >= RING_GB_PER_S
        ok &= found.get("sums_s_per_gb", math.inf) <= SUMS_S_PER_GB
        ok &= all(slower.get(key, math.inf) <= most for key, most in SLOWER.items())
    return {"ok": ok, "shown": {**shown, **failure(error)}, **found}


def failure(error: str) -> Figures:
    return {"failed": error} if error else {}


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
    shown = check.lines("nvml")[0]["found"]
    return {"ok": bool(shown.get("used_mib")) or not check.is_gpu, "shown": shown}


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
