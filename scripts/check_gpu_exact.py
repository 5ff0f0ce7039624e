"""Exactness: a rank is killed at step 7 of 12, and its state compared with an undisturbed run."""

import os
from concurrent.futures import ThreadPoolExecutor

import torch
from check_gpu_runs import Check, Figures, Lines

VARIANTS = (
    *("adamw", "adamw-plain", "adamw-fused", "sgd", "amp", "dropout", "channels-last"),
    *("accumulate", "group", "fsdp", "dict", "in-backward"),
)
COMPILED = "compile"
WITH_GRAPHS = "reduce-overhead"
"""Compiled for graphs of CUDA."""
ON_A_DEVICE = ("own-stream", "step-stream", "capturable")
GRAPHS = ("graph", "graph-update")
AT_ONCE = max(1, (os.cpu_count() or 1) // 2)


def exact(check: Check) -> Figures:
    """Kill at step 7 of 12, and compare all state with that of an undisturbed run."""
    names = check.args.variants.split(",") if check.args.variants else variants(check.args.device)
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


def variants(device: str) -> list[str]:
    """Those that torch has for the device; what takes longest comes first."""
    names = [] if device == "fake" else [COMPILED]
    names += [WITH_GRAPHS] if device == "cuda" else []
    names += VARIANTS
    if device != "cpu":
        names += ON_A_DEVICE
        if device == "cuda" or hasattr(torch.accelerator, "Graph"):
            names += GRAPHS
    return names


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
