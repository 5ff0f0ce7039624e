"""`ftrun estimate`: its text, picture and errors. The page of the docs shows its output."""

import json
import re
import shlex
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from made_journals import long_run
from typer.testing import CliRunner

from ftrun.cli.app import app
from ftrun.cli.screen import terminal as render
from ftrun.errors import FtrunError, UsageError
from ftrun.tools.estimate import text as words
from ftrun.tools.estimate.assumptions import ABOUT, Assumptions, flag_of
from ftrun.tools.estimate.command import (
    default_text,
    estimate_help,
    estimated,
    measured_in,
    node_counts,
    nothing_measured,
)
from ftrun.tools.estimate.outlook import MAX_NODES, FixedChoices, outlook
from ftrun.tools.estimate.text import picture
from ftrun.tools.report.render.svg import width_of
from ftrun.tools.report.run import run_facts

ROOT = Path(__file__).parents[3]
JOURNALS = Path(__file__).parent / "journals"
PAGE = (ROOT / "docs" / "estimate.md").read_text()
SVG = "{http://www.w3.org/2000/svg}"


def run(*line: str) -> str:
    """The command's output; errors are raised."""
    found = CliRunner().invoke(app, ["estimate", *line], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.output


def document(*line: str) -> dict[str, Any]:
    return json.loads(run(*line, "--json"))


# --- the page of the docs ---------------------------------------------------------------------


def blocks() -> list[tuple[str, str]]:
    """Each command of the page, and the output below it."""
    return re.findall(r"^```\n\$ ftrun estimate ?(.*)\n((?:.*\n)*?)```$", PAGE, re.MULTILINE)


def test_the_worked_examples_are_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "NO_WIDTH", 120)  # as on a terminal of that width
    assert len(blocks()) == 2
    for line, reported in blocks():
        assert reported.rstrip("\n") == run(*shlex.split(line)).rstrip("\n")


def test_each_assumption_is_shown_on_the_page_with_default_and_source() -> None:
    cells = [re.split(r" \| ", line.strip("| ")) for line in PAGE.splitlines() if "| `--" in line]
    reported = {cell[0].strip("`"): cell[1:] for cell in cells}
    for name, about in ABOUT.items():
        default = default_text(name) or "-"
        assert reported[flag_of(name)] == [about.unit, default, about.meaning, about.source], name


def test_each_assumption_is_shown_in_the_help_with_default_and_source() -> None:
    plain = " ".join(estimate_help().split()).replace("- ", "-")
    for name, about in ABOUT.items():
        assert f"{flag_of(name)} {about.unit.upper()} " in plain
        for reported in (about.meaning, about.source, default_text(name)):
            assert " ".join(reported.split()).replace("- ", "-") in plain, reported


def test_the_help_is_the_commands_own() -> None:
    assert run("--help").rstrip() == estimate_help().rstrip()


# --- numbers of nodes -------------------------------------------------------------------------


def test_numbers_of_nodes() -> None:
    assert node_counts("64") == [64]
    assert node_counts("16..128") == [16, 32, 64, 128]
    assert node_counts("3..20") == [3, 6, 12, 20]
    assert node_counts("1000,16, 64..64") == [16, 64, 1000]


@pytest.mark.parametrize(
    ("line", "reported"),
    [
        (["--nodes", "0"], "from 1 to 100,000"),
        (["--nodes", f"{MAX_NODES + 1}"], "from 1 to 100,000"),
        (["--nodes", "64..16"], "64 is above 16"),
        (["--nodes", "many"], "neither a number nor a range"),
        (["--nodes", "-4"], "neither a number nor a range"),
        (["--nodes", ",".join(map(str, range(1, 70)))], "names 69 numbers; 64"),
        (["--days", "-1"], "--days -1 is not above 0"),
        (["--rate", "nan"], "--rate nan"),
        (["--step", "0", "--risk", "2"], "--step 0 is not at least 1e-06"),
        (["--hang-share", "0.9", "--node-share", "0.9"], "are 1.814 together"),
        (["--nodes", "4..16", "--code", "6+2"], "needs 8 nodes, and --nodes begins at 4"),
        (["--code", "6"], "neither K+M, such as 6+2, nor mirror"),
        (["--code", "0+2"], "K is 1 to 32"),
        (["--snapshot-every", "0"], "--snapshot-every is at least 1, not 0"),
        (["--spares", "-1"], "--spares is at least 0, not -1"),
        (["--run", "no-such-run"], "no journal of run no-such-run"),
        (["--svg", "-", "--json"], "can have stdout"),
    ],
)
def test_what_cannot_be_is_reported(line: list[str], reported: str) -> None:
    with pytest.raises(UsageError) as error:
        run(*line)
    assert reported in str(error.value)


def test_all_that_is_wrong_is_reported_at_once() -> None:
    with pytest.raises(UsageError) as error:
        estimated("64", {"days": -1.0, "rate": -2.0})
    assert "--days -1" in str(error.value)
    assert "--rate -2" in str(error.value)


def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FtrunError) as error:
        run("--nodes", "16", "--svg", str(tmp_path / "none" / "x.svg"))
    assert "--svg" in str(error.value)


# --- text -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "reported"),
    [
        (0.0, "none"),
        (1e-13, "below 1 in 10^12"),
        (1.72e-7, "1 in 5,800,000"),
        (0.0004, "1 in 2,500"),
        (0.0123, "1.2 %"),
        (0.5, "50.0 %"),
        (1.0, "100.0 %"),
    ],
)
def test_chances_in_words(p: float, reported: str) -> None:
    assert words.chance(p) == reported


def test_small_parts_are_not_nothing() -> None:
    assert [words.part(p) for p in (0.0, 1e-7, 2e-4, 0.25)] == [
        "0 %", "below 0.001 %", "0.02 %", "25.0 %"]  # fmt: skip


def advice(nodes: int, decided: FixedChoices | None = None, **values: float) -> dict[str, str]:
    given = Assumptions(**values)
    return dict(words.advice(outlook(nodes, given, decided or FixedChoices()), given))


def test_each_choice_reports_why() -> None:
    large = advice(2048)
    assert "as --erasure auto chooses" in large["code"]
    assert "with 7+1 of 0.48 %" in large["code"]
    assert "neighbours in one group" in large["code"]
    assert "--snapshot-every 12" in large["interval"]
    assert "--spares 4" in large["spares"]
    assert "more" in large["goodput"]
    small = advice(16)
    assert "--erasure 7+1; auto: 6+2" in small["code"]
    assert "more parity does not" in small["code"]
    assert small["spares"].startswith("none")


def test_a_false_condition_is_not_reported() -> None:
    assert advice(1)["code"].startswith("none: there is no other node")
    assert advice(16, risk=1.0)["code"].startswith("none is needed")
    assert "as given" in advice(64, FixedChoices(code=(6, 2)))["code"]
    assert "nothing fails" in advice(64, rate=0.0)["goodput"]
    assert "protected first" in advice(16384, state_gb=100.0, snapshot_cost_s=0.1)["interval"]
    assert "as auto does" in advice(2048, FixedChoices(every=6))["interval"]
    assert "less" in advice(16, snapshot_cost_s=4000.0, state_gb=1e5)["goodput"]
    assert "at once" not in advice(2048, domain_share=0.0)["spares"]


def test_the_model_reports_where_it_is_too_kind() -> None:
    given = Assumptions()
    few, many = (outlook(nodes, given, FixedChoices()) for nodes in (2, 5000))
    assert any("below 16" in one for one in words.caveats([few, many], given))
    assert any("--crowding" in one for one in words.caveats([few, many], given))
    assert any("--restart-more" in one for one in words.caveats([few], given))
    known = Assumptions(restart_more_s=20.0)
    assert not any("--restart-more" in one for one in words.caveats([few], known))
    crowded = Assumptions(crowding=0.9)
    assert not any("--crowding" in one for one in words.caveats([many], crowded))


def test_json_has_each_assumption_with_its_origin() -> None:
    found = document("--nodes", "16,64", "--rate", "0", "--days", "10")
    by_flag = {one["flag"]: one for one in found["assumptions"]}
    assert by_flag["--days"]["origin"] == "given"
    assert by_flag["--step"]["origin"].startswith("default: ")
    assert [one["nodes"] for one in found["nodes"]] == [16, 64]
    # JSON has no infinity.
    assert found["nodes"][0]["mtbf_s"] is None
    assert {"code", "interval", "spares", "goodput"} <= set(found["advice"])


# --- estimate from a run ----------------------------------------------------------------------


def put_journal(folder: Path, name: str, raw: list[bytes]) -> None:
    (folder / "ftrun-logs" / name).mkdir(parents=True)
    (folder / "ftrun-logs" / name / "journal.jsonl").write_bytes(b"".join(raw))


def test_what_a_run_has_cost_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_journal(tmp_path, "big-1", long_run(nodes=4).raw())
    monkeypatch.chdir(tmp_path)
    found = document("--nodes", "64", "--run", "last", "--crash-detect", "2")
    reported = {one["flag"]: (one["value"], one["origin"]) for one in found["assumptions"]}
    assert reported["--step"] == (0.25, "run big-1: median of its steps")
    # 0.4 s more each minute, and 24 snapshots.
    assert reported["--snapshot-cost"][0] == pytest.approx(0.4 / 24)
    assert reported["--hang-detect"][0] == pytest.approx(12.5, abs=0.3)
    assert reported["--restart"][1] == "run big-1: median of 2 restarts"
    assert 0.3 < reported["--restart"][0] < 1.0
    assert reported["--restart-more"][0] == 0.0
    # A given value overrides the measured one, and an unmeasured one keeps its default.
    assert reported["--crash-detect"] == (2.0, "given")
    assert reported["--node-detect"][1].startswith("default: ")
    assert "assumed: --step 0.25 (run big-1" in run("--nodes", "64", "--run", "big-1")


def test_a_run_that_lost_a_node_reports_how_soon_that_was_known() -> None:
    facts = run_facts((JOURNALS / "node-lost-named.jsonl").read_bytes().splitlines(keepends=True))
    found = measured_in(facts)
    assert found["node_detect_s"].how == "median of 1 lost node"
    assert 0 < found["node_detect_s"].value < 10
    assert "restart_s" in found


def test_a_notice_without_a_first_sign_is_no_measurement() -> None:
    raw = (JOURNALS / "one-node-two-kills.jsonl").read_bytes().splitlines(keepends=True)
    found = measured_in(run_facts(raw))
    assert "crash_detect_s" not in found
    assert found["restart_s"].how == "median of 2 restarts"


def test_a_run_that_reports_too_little_is_reported() -> None:
    made = long_run()
    made.entries = [
        one for one in made.entries if one["kind"] in ("run_started", "ballot_started", "run_ended")
    ]
    facts = run_facts(made.raw())
    assert measured_in(facts) == {}
    reported = nothing_measured(facts, [])
    assert "the cost of a snapshot" in reported
    assert "the cost of a restart" in reported
    assert nothing_measured(facts, ["snapshot_cost_s", "restart_s"]) == ""


# --- the picture ------------------------------------------------------------------------------


def drawn(nodes: str, **values: float) -> ElementTree.Element:
    made = estimated(nodes, values)
    return ElementTree.fromstring(str(picture(made.outlooks)))


def test_the_picture_has_a_curve_for_each_way() -> None:
    root = drawn("16..1024")
    assert [one.get("class") for one in root.iter(f"{SVG}path")] == ["way-0", "way-1", "way-2"]
    texts = [one.text or "" for one in root.iter(f"{SVG}text")]
    assert {"16", "1,024"} <= set(texts)
    assert any("snapshots under ftrun" in one for one in texts)
    assert "with 1,024 nodes" in (root.find(f"{SVG}desc").text or "")


def test_labels_do_not_lie_on_each_other() -> None:
    root = drawn("16..64")
    ends = [float(one.get("y", "0")) for one in root.iter(f"{SVG}text")
            if one.get("class") == "label"]  # fmt: skip
    assert min(b - a for a, b in zip(sorted(ends), sorted(ends)[1:], strict=False)) >= 14


@pytest.mark.parametrize("nodes", ["64", "1", "16..512", ",".join(map(str, range(100, 160)))])
def test_all_of_the_picture_is_within_it(nodes: str) -> None:
    root = drawn(nodes, rate=0.0) if nodes == "1" else drawn(nodes)
    width, height = (float(one) for one in root.get("viewBox", "").split()[2:])
    for one in root.iter(f"{SVG}text"):
        x, wide = float(one.get("x", "-1")), width_of(one.text or "", 13)
        ends = {"middle": wide / 2, "end": 0.0}.get(one.get("text-anchor", ""), wide)
        assert x - wide + ends >= 0
        assert x + ends <= width, one.text
        assert 0 <= float(one.get("y", "-1")) <= height
    for one in root.iter(f"{SVG}rect"):
        assert 0 <= float(one.get("y", "-1")) <= height - float(one.get("height", "0"))


def test_files_are_whole_and_need_nothing_else(tmp_path: Path) -> None:
    svg, html = tmp_path / "x.svg", tmp_path / "x.html"
    reported = run("--nodes", "16..64", "--svg", str(svg), "--html", str(html))
    assert reported.endswith(f"{svg}\n{html}\n")
    root = ElementTree.fromstring(svg.read_text())
    style = root.find(f"{SVG}style")
    assert style is not None
    assert ".way-2{stroke:#2bb08a}" in (style.text or "")
    assert "var(" not in (style.text or "")
    page = html.read_text()
    assert "<svg" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    for name in ABOUT:
        assert f">{flag_of(name)}<" in page


def test_one_document_can_have_stdout() -> None:
    assert ElementTree.fromstring(run("--nodes", "16", "--svg", "-")).tag == f"{SVG}svg"
    assert run("--nodes", "16", "--html", "-").startswith("<!doctype html>")


# --- the axis of the picture ------------------------------------------------------------------


class Drawn:
    """The labels of the axis by height."""

    def __init__(self) -> None:
        self.labels: list[str] = []

    def line(self, *_: Any) -> None:
        pass

    def text(self, _x: float, _y: float, label: str, *_: Any) -> None:
        self.labels.append(label)


def test_the_axis_begins_at_zero_where_a_value_is_low() -> None:
    assert words._floor(0.69) == 0.0
    assert 0.7 < words._floor(0.9) <= 0.9


@pytest.mark.parametrize("least", [one / 100 for one in range(0, 99, 3)])
def test_no_label_is_below_the_axis(least: float) -> None:
    drawn = Drawn()
    words._grid(drawn, [], [], least)  # type: ignore[arg-type]
    shown = [float(label.removesuffix(" %")) for label in drawn.labels if "%" in label]
    assert shown[0] == 100
    assert min(shown) >= 100 * least - 1e-6


def test_a_mirror_is_judged_like_a_code() -> None:
    alone = ("--nodes", "8", "--domain-share", "0")  # one domain has all nodes
    found = document(*alone, "--code", "mirror")
    (one,) = found["nodes"][0]["codes"]
    coded = document(*alone, "--code", "7+1")["nodes"][0]["codes"][0]
    assert found["nodes"][0]["code"] == "mirror"
    assert (one["data"], one["parity"]) == (0, 1)
    assert 0 < one["loss"] < coded["loss"] / 3, "two of seven other nodes are neighbours"
    assert "mirror, as given" in run("--nodes", "8", "--code", "mirror")
    assert "100 % of the state" in run("--nodes", "8", "--code", "mirror")
    with pytest.raises(UsageError, match="mirror needs 2 nodes, and --nodes begins at 1"):
        estimated("1", {}, code="mirror")
