"""docs/grafana-dashboard.json queries only metrics of /metrics, and shows all of them."""

import ast
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs/grafana-dashboard.json").read_text())
LEFT_OUT = {"ftrun_uptime_seconds", "ftrun_lifecycle_state"}
"""Metrics that are not worth a graph."""


def names_in_code() -> set[str]:
    """The name of every metric in a scrape, from the calls that create the families."""
    found: set[str] = set()
    tree = ast.parse((ROOT / "ftrun/agent/publish/metrics.py").read_text())
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Name)):
            continue
        first = node.args[0]
        if not (isinstance(first, ast.Constant) and str(first.value).startswith("ftrun_")):
            continue
        name = str(first.value)
        match node.func.id:
            case "CounterMetricFamily":
                found.add(f"{name}_total")
            case "HistogramMetricFamily":
                found |= {f"{name}_{part}" for part in ("bucket", "sum", "count")}
            case "InfoMetricFamily":
                found.add(f"{name}_info")
            case _:
                found.add(name)
    return found


def names_asked_for() -> set[str]:
    return set(re.findall(r"\bftrun_\w+", json.dumps({**DASHBOARD, "uid": ""})))


def test_every_name_that_is_asked_for_is_there() -> None:
    assert names_in_code() > {"ftrun_step", "ftrun_incidents_total", "ftrun_recovery_seconds_sum"}
    assert names_asked_for() - names_in_code() == set()


def test_every_figure_is_shown() -> None:
    assert names_in_code() - names_asked_for() == LEFT_OUT


def test_every_name_is_documented() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    plain = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names_in_code()}
    assert {name for name in plain if f"`{name}" not in text} == set()


def test_it_is_a_dashboard() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["targets"]
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
            assert all(target["expr"].count("(") == target["expr"].count(")")
                       for target in panel["targets"])  # fmt: skip
    names = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(panels)))
    assert used <= names


def test_no_two_panels_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
