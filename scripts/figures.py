#!/usr/bin/env python3
"""Measure the figures of README.md, and write them into it.

    python scripts/figures.py               # draw docs/figures/recovery.svg and fill in README.md
    python scripts/figures.py --measure     # measure before; a virtual cluster needs root

`--measure` writes three files to docs/figures/, all of the same commit and date:

example.json   the example of README.md: one rank is killed, and the output of ftrun
recovery.json  scripts/bench_recovery.py: a killed rank under ftrun and under torchrun
costs.json     `ftrun drill docs/figures/costs.yaml`: the cost of each kind of failure

The picture and the text of README.md between `<!-- figures: NAME -->` and `<!-- end -->` are
generated from these files only; tests/architecture/test_figures.py compares them.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from bench_common import ROOT, BenchError, Parser, commit, conditions, run_bench, scratch

README = ROOT / "README.md"
FOLDER = ROOT / "docs" / "figures"
PICTURE = FOLDER / "recovery.svg"
RUN_ID = f"figures-{os.getpid()}"
KILL_AT = 500
EXAMPLE_S = 180.0
WIDE, WIDE_PROSE = 100, 120

MOMENTS = {
    "detected": "the launcher notices the death",
    "started": "the script runs again, with torch imported",
    "joined": "all ranks have joined the process group",
    "restored": "model and optimizer are built, their state restored",
    "stepped": "the next step is complete on all ranks",
}
FAILURES = {
    ("rank-kill", "1 x 2"): "a rank is killed (`kill -9`)",
    ("exception", "1 x 2"): "a rank raises an exception",
    ("stop", "1 x 2"): "a rank is stopped (SIGSTOP)",
    ("hang", "1 x 2"): "a rank hangs",
    ("smp-kill", "1 x 2"): "the process that holds the snapshots is killed",
    ("agent-kill", "1 x 2"): "the agent of a node is killed",
    ("cluster:rank-kill", "2 x 1 + 1"): "a rank is killed, two nodes",
    ("cluster:reset", "2 x 1 + 1"): "a node is lost; its address refuses connections",
    ("cluster:power-off", "2 x 1 + 1"): "a node is lost without a sign",
    ("cluster:lead-power-off", "2 x 1 + 1"): "the leader's node is lost without a sign",
}


def main() -> int:
    args = parse_arguments()
    if args.measure:
        if commit().endswith("-dirty"):
            raise BenchError("figures belong to a commit: commit the changes first")
        measure(args.kills)
    example, recovery, costs = read("example"), read("recovery"), read("costs")
    PICTURE.write_text(picture(recovery), encoding="utf-8")
    text = README.read_text(encoding="utf-8")
    README.write_text(filled(text, example, recovery, costs), encoding="utf-8")
    return 0


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


# --- measuring --------------------------------------------------------------------------------


def measure(kills: int) -> None:
    about = conditions()
    with scratch(base=None) as folder:
        example = measured_example(folder)
        raw = folder / "recovery.json"
        subprocess.run(
            [sys.executable, "scripts/bench_recovery.py", "--kills", str(kills), "--json", raw],
            cwd=ROOT,
            check=True,
        )
        recovery = json.loads(raw.read_text())
        costs = {"failures": measured_costs(folder)}
    for name, found in (("example", example), ("recovery", recovery), ("costs", costs)):
        text = json.dumps({**found, "conditions": about}, indent=1) + "\n"
        (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")


def program(*words: object) -> tuple[list[str], dict[str, str]]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return [sys.executable, *map(str, words)], variables


def measured_example(folder: Path) -> dict[str, Any]:
    """Runs the script of README.md, and kills rank 1 once."""
    script = script_of(README.read_text(encoding="utf-8"))
    (folder / "train.py").write_text(script)
    words = ["--nproc-per-node", 2, "train.py"]
    command, variables = program("-m", "ftrun", "--run-id", RUN_ID, *words)
    with (folder / "output").open("wb") as output:
        run = subprocess.Popen(
            command, cwd=folder, env=variables, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            pid = killed_rank(run)
            code = run.wait(EXAMPLE_S)
        finally:
            run.terminate()
            run.wait()
    if code != 0:
        raise BenchError(f"the example ended with {code}: {(folder / 'output').read_text()}")
    command, variables = program("-m", "torch.distributed.run", "--standalone", *words)
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": EXAMPLE_S}
    undisturbed = subprocess.run(command, cwd=folder, env=variables, check=True, **options)
    return {
        "script": script.splitlines(),
        "command": f"ftrun {' '.join(map(str, words))}",
        "killed": f"kill -9 {pid}",
        "output": (folder / "output").read_text().splitlines(),
        # Python writes the line break separately, so two ranks may share a line.
        "torchrun_output": sorted(re.findall(r"rank \d+: loss \d+\.\d{9}", undisturbed.stdout)),
    }


def killed_rank(run: "subprocess.Popen[bytes]") -> int:
    """Kills rank 1 at step `KILL_AT` or later, and returns its process id."""
    command, variables = program("-m", "ftrun", "status", RUN_ID, "--json")
    end_s = time.monotonic() + EXAMPLE_S
    while time.monotonic() < end_s and run.poll() is None:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        with contextlib.suppress(ValueError):
            for rank in json.loads(done.stdout)["ranks"]:
                if rank["rank"] == 1 and (rank["step"] or 0) >= KILL_AT:
                    os.kill(rank["pid"], signal.SIGKILL)
                    return int(rank["pid"])
    raise BenchError(f"rank 1 of the example did not reach step {KILL_AT}")


def measured_costs(folder: Path) -> list[dict[str, Any]]:
    """Runs the drill; a row for each kind of failure, of all its trials."""
    out = folder / "drill"
    command, variables = program("-m", "ftrun", "drill", FOLDER / "costs.yaml", "--out", out)
    done = subprocess.run(command, cwd=folder, env=variables, check=False)
    trials = json.loads((out / "drill.json").read_text())
    failed = [one["problem"] for one in trials if not one["passed"]]
    if done.returncode != 0 or failed:
        raise BenchError(f"the drill ended with {done.returncode}: {failed}")
    found = []
    for (kind, nodes), name in FAILURES.items():
        rows = [one for one in trials if (one["kind"], one["nodes"]) == (kind, nodes)]
        verdicts = {one["found"] for one in rows}
        actions = {one["action"] for one in rows}
        if len(verdicts) != 1 or len(actions) != 1:
            raise BenchError(f"{name}: verdicts {verdicts}, actions {actions}")
        found.append(
            {
                "failure": name,
                "kind": kind,
                "nodes": nodes,
                "trials": len(rows),
                "verdict": verdicts.pop(),
                "action": actions.pop(),
                "detected_s": median_of(rows, "detected_s"),
                "training_again_s": median_of(rows, "training_again_s"),
                "steps_repeated": max(steps_repeated(one, out) for one in rows),
                "is_equal": all(one["equal"] for one in rows),
            }
        )
    return found


def steps_repeated(trial: Mapping[str, Any], out: Path) -> int:
    """Of a trial; if its leader has not counted them, from the records of its run's ranks."""
    if trial["steps_lost"] is not None:
        return int(trial["steps_lost"])
    lost, done = 0, -1
    for generation in range(2):
        steps = [
            [note["step"] for note in rank if note["generation"] == generation]
            for rank in notes_of(out / trial["run"])
        ]
        lost += max(0, done + 1 - min(min(rank) for rank in steps))
        done = min(max(rank) for rank in steps)
    return lost


def notes_of(folder: Path) -> list[list[dict[str, Any]]]:
    lines = [path.read_text().splitlines() for path in sorted(folder.glob("rank*.jsonl"))]
    return [[note for note in map(json.loads, rank) if note["kind"] == "step"] for rank in lines]


def median_of(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row[key] is not None]
    return round(statistics.median(values), 3) if values else None


# --- README.md --------------------------------------------------------------------------------


def script_of(readme: str) -> str:
    """The script of the example: the first block of Python."""
    found = re.search(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    if found is None:
        raise BenchError("README.md has no example")
    return found.group(1)


def filled(
    text: str, example: Mapping[str, Any], recovery: Mapping[str, Any], costs: Mapping[str, Any]
) -> str:
    blocks = {
        "example": example_text(example),
        "recovery": recovery_text(recovery),
        "costs": costs_text(costs),
        "conditions": conditions_text(costs["conditions"]),
    }
    for name, block in blocks.items():
        begin, end = f"<!-- figures: {name} -->\n", "<!-- end -->"
        count = text.count(begin)
        if count != 1:
            raise BenchError(f"README.md has {count} places for the figures of {name}")
        before, _, rest = text.partition(begin)
        text = before + begin + block + "\n" + end + rest.partition(end)[2]
    return text


def example_text(example: Mapping[str, Any]) -> str:
    lines = [
        f"$ {example['command']}",
        f"$ {example['killed']}      # rank 1, from another terminal",
    ]
    for line in example["output"]:
        # The surviving ranks print the error of their collective before they are stopped.
        shown = "..." if line.startswith("[rank") else shortened(line)
        lines += [shown] if shown != lines[-1] else []
    return "\n".join(["```", *lines, "```"])


def shortened(line: str) -> str:
    """Shorten to at most `WIDE` characters, between two words."""
    return line if len(line) <= WIDE else f"{line[: WIDE - 4].rpartition(' ')[0]} ..."


def recovery_text(recovery: Mapping[str, Any]) -> str:
    ours, theirs = (recovery[name]["median"] for name in ("ftrun", "torchrun"))
    most = max(recovery["ftrun"]["steps_repeated"])
    return textwrap.fill(
        f"Medians of {recovery['ftrun']['count']} kills each, {recovery['ranks']} ranks, DDP, "
        f"{recovery['state_mb']:g} MB of state. ftrun: {seconds(ours)}, and at most {most} "
        f"completed step{'' if most == 1 else 's'} repeated, with a snapshot every step. torchrun: "
        f"{seconds(theirs)}, and every step since the script's last checkpoint repeated; that "
        "checkpoint is read from memory here, which is the best case.",
        WIDE_PROSE,
    )


def costs_text(costs: Mapping[str, Any]) -> str:
    lines = [
        "| failure | verdict | detected after | next step after | steps repeated | result equal |",
        "| --- | --- | --: | --: | --: | --- |",
    ]
    for one in costs["failures"]:
        again_s = one["training_again_s"]
        cells = (
            one["failure"],
            "none needed" if one["verdict"] == "no incident" else one["verdict"],
            "-" if one["verdict"] == "no incident" else seconds(one["detected_s"]),
            "training does not stop" if again_s is None else seconds(again_s),
            str(one["steps_repeated"]),
            "yes" if one["is_equal"] else "NO",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def conditions_text(about: Mapping[str, Any]) -> str:
    return textwrap.fill(
        f"All figures on this page: `scripts/figures.py --measure`, {about['date']}, commit "
        f"{about['commit']}, {about['cores']} cores of {about['cpu']}, no GPU, torch "
        f"{about['torch']}, Python {about['python']}.",
        WIDE_PROSE,
    )


def seconds(value_s: float) -> str:
    return f"{value_s:.2f} s" if value_s < 10 else f"{value_s:.1f} s"


# --- the picture ------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT, BAR = 760, 20, 20, 26
STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #1f2328 }
.title { font-size: 15px; font-weight: 600 }
.muted { fill: #59636e }
.number { text-anchor: end }
.guide { stroke: #818b98; stroke-width: 1; stroke-dasharray: 3 3 }
.detected { fill: #818b98 } .started { fill: #d98f00 } .joined { fill: #3f9ed6 }
.restored { fill: #12946b } .stepped { fill: #c06a9a }
@media (prefers-color-scheme: dark) { text { fill: #f0f6fc } .muted { fill: #9198a1 } }
"""


def picture(recovery: Mapping[str, Any]) -> str:
    """One recovery under torchrun and under ftrun on one scale, and ftrun's enlarged."""
    ends = {name: recovery[name]["moments_s"] for name in ("torchrun", "ftrun")}
    total = {name: ends[name]["stepped"] for name in ends}
    space = WIDTH - LEFT - RIGHT - 70
    title = "From kill -9 of one rank to the next step on all ranks"
    parts = [label(LEFT, 24, title, "title")]
    for top, name in ((44, "torchrun"), (104, "ftrun")):
        parts.append(label(LEFT, top + 12, name))
        parts += bar(ends[name], top + 20, space / total["torchrun"])
        at = LEFT + space * total[name] / total["torchrun"]
        parts.append(label(at + 8, top + 38, seconds(total[name])))
    right = LEFT + space * total["ftrun"] / total["torchrun"]
    top = 184
    for x1, x2 in ((LEFT, LEFT), (right, LEFT + space)):
        parts.append(f'<line class="guide" x1="{x1:.1f}" y1="150" x2="{x2:.1f}" y2="{top + 20}"/>')
    scale = total["torchrun"] / total["ftrun"]
    parts += bar(ends["ftrun"], top + 20, space / total["ftrun"])
    parts.append(label(LEFT + space + 8, top + 38, seconds(total["ftrun"])))
    parts.append(
        label(LEFT + space / 2, top + 14, f"ftrun, {scale:.0f} times enlarged", "muted mid")
    )
    top += 74
    parts.append(label(LEFT, top, "seconds since the kill until", "muted"))
    columns = {"torchrun": WIDTH - 160, "ftrun": WIDTH - 70}
    for name, x in columns.items():
        parts.append(label(x, top, name, "muted number"))
    for number, (moment, words) in enumerate(MOMENTS.items(), 1):
        y = top + 22 * number
        parts.append(f'<rect class="{moment}" x="{LEFT}" y="{y - 11}" width="13" height="13"/>')
        parts.append(label(LEFT + 22, y, words))
        for name, x in columns.items():
            parts.append(label(x, y, f"{ends[name][moment]:.2f}", "number"))
    height = top + 22 * len(MOMENTS) + 14
    style = f"{STYLE}.mid {{ text-anchor: middle }}\n"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">\n<title>{title}: torchrun '
        f"{seconds(total['torchrun'])}, ftrun {seconds(total['ftrun'])}</title>\n"
        f"<style>{style}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def bar(ends: Mapping[str, float], top: float, px_per_s: float) -> list[str]:
    found, begin = [], 0.0
    for moment in MOMENTS:
        x, width = LEFT + begin * px_per_s, (ends[moment] - begin) * px_per_s
        found.append(
            f'<rect class="{moment}" x="{x:.1f}" y="{top}" width="{width:.1f}" height="{BAR}"/>'
        )
        begin = ends[moment]
    return found


def label(x: float, y: float, words: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text{kind} x="{x:.1f}" y="{y}">{escape(words)}</text>'


def parse_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--measure", action="store_true", help="measure first")
    parser.option("--kills", int, 7, "number of kills of each launcher")
    return parser.parse_args()


if __name__ == "__main__":
    run_bench(main)
