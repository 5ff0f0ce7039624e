"""Costs of snapshots, plain copies, and NVML."""

import statistics

from check_gpu_runs import Check, Figures

BOUNDARY_S = 0.005
"""Required: the median boundary on the host."""

PINNED_OVER_PAGEABLE = 3.0
"""Required of copies from the device."""


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
    ok = not check.is_gpu or shown["boundary_p50_ms"] <= 1e3 * BOUNDARY_S
    return {"ok": ok, "shown": {k: round(v, 3) for k, v in shown.items()}, **found}


def rates(check: Check) -> Figures:
    """Plain copies and the time to pin memory, for comparison."""
    error = check.run(check.plain("rates"))
    if error:
        return {"ok": False, "shown": {"failed": error}}
    shown = check.lines("rates")[0]["found"]
    ratio = shown["d2h_pinned_gb_per_s"] / shown["d2h_pageable_gb_per_s"]
    ok = not check.is_gpu or ratio >= PINNED_OVER_PAGEABLE
    return {"ok": ok, "shown": {**shown, "pinned_over_pageable": round(ratio, 2)}}


def nvml(check: Check) -> Figures:
    """The error events that the driver can report, the recovery action, and memory in use."""
    error = check.run(check.plain("nvml"))
    if error:
        return {"ok": False, "shown": {"failed": error}}
    shown = check.lines("nvml")[0]["found"]
    return {"ok": bool(shown.get("used_mib")) or not check.is_gpu, "shown": shown}


def conformance(check: Check) -> Figures:
    """What the tests assume about a device, on this device: `tests/fake_device/conformance.py`."""
    if not check.is_gpu:
        return {"ok": None, "shown": {"not run": "needs a GPU"}}
    error = check.run(check.plain("conformance"))
    if error:
        return {"ok": False, "shown": {"failed": error}}
    found = check.lines("conformance")[0]["found"]
    bad = {name: text for name, text in found.items() if text}
    return {
        "ok": not bad,
        "shown": {"as_assumed": f"{len(found) - len(bad)} of {len(found)}", **bad},
    }
