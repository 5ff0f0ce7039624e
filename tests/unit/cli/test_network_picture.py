"""The picture and the page of `ftrun network`: inside its frame, with text, self-contained."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_networks import made_network
from typer.testing import CliRunner

from ftrun.cli.app import app
from ftrun.errors import UsageError
from ftrun.journal import NETWORK_NAME
from ftrun.tools.network_view.facts import network_facts
from ftrun.tools.network_view.picture import picture
from ftrun.tools.report.render.page import MAX_BYTES
from ftrun.tools.report.render.svg import width_of
from ftrun.wire.messages.status import NetworkStatus

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = '</text><script>alert(1)</script>"><img src=http://example.org/x>'


def drawn(document: dict[str, Any]) -> ElementTree.Element:
    facts = network_facts(msgspec.convert(document, NetworkStatus))
    return ElementTree.fromstring(str(picture(facts)))


def texts(root: ElementTree.Element) -> list[str]:
    return [one.text or "" for one in root.iter(f"{SVG}text")]


def styles(root: ElementTree.Element, tag: str) -> list[str]:
    return [one.get("class", "") for one in root.iter(f"{SVG}{tag}")]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the journal of a finished run."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "ftrun-logs" / "big-1"
    folder.mkdir(parents=True)
    (folder / "journal.jsonl").write_text('{"kind": "run"}\n')
    return folder / NETWORK_NAME


def run(*line: str) -> str:
    found = CliRunner().invoke(app, ["network", *line], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.output


# --- a few nodes ------------------------------------------------------------------------------


def test_nodes_are_shown_on_their_leaves_in_the_order_of_the_ring() -> None:
    document = made_network(6)
    root = drawn(document)
    boxes = {one.text: one for one in root.iter(f"{SVG}text") if one.get("class") == "label strong"}
    for place, node in enumerate(document["plan"]["order"]):
        assert f"{place} {node}" in boxes
    at = {name.split()[-1]: float(one.get("x", "")) for name, one in boxes.items() if name}
    near = max(at[f"node{number}"] for number in (0, 2, 4))
    assert at["leaf0"] < near < at["leaf1"] < min(at[f"node{number}"] for number in (1, 3, 5))
    assert {"leaf0", "leaf1", "eth0", "eth1"} <= set(texts(root))
    assert styles(root, "path").count("ring") == 6
    assert any("2 of 6 hops between leaves" in one for one in texts(root))


def test_dead_and_slow_rails_are_marked_with_lines_and_words() -> None:
    root = drawn(made_network(6, dead={("node3", "eth1")}, slow={("node2", "eth0")}))
    assert styles(root, "line").count("cross") == 2
    # One each, and one in the legend.
    assert styles(root, "line").count("link-dead") == 2
    assert styles(root, "line").count("link-slow") == 2
    assert "dead" in texts(root)
    about = root.find(f"{SVG}desc").text or ""
    assert "node3's eth1 is dead" in about
    assert "node2's eth0 is slow" in about


def test_a_single_dead_path_is_an_arc_and_a_sentence() -> None:
    root = drawn(made_network(6, cut={("node1", "node4", "eth1")}))
    assert styles(root, "path").count("link-dead") == 1
    assert "node1 to node4 over eth1: dead: no answer within 0.5 s" in texts(root)
    assert styles(root, "line").count("cross") == 0


def test_a_rail_that_is_left_out_is_an_outline() -> None:
    root = drawn(made_network(4, slow={("node2", "eth1")}))
    assert "left-out rail-1" in styles(root, "rect")
    assert "eth1: not for training" in texts(root)


def test_leaves_that_are_not_known_are_not_drawn() -> None:
    root = drawn(made_network(3, leaves=0))
    assert "leaf switches are not known" in texts(root)
    assert "uplink" not in styles(root, "line")


# --- many nodes -------------------------------------------------------------------------------


def test_many_nodes_are_squares_and_the_bad_ones_have_names() -> None:
    root = drawn(made_network(64, leaves=8, slow={("node6", "eth1")}, dead={("node50", "eth0")},
                              cut={("node2", "node5", "eth0")}, every=3))  # fmt: skip
    tips = [one.text or "" for one in root.iter(f"{SVG}title")][1:]
    assert sorted(tips) == [
        "node2: one path of it is bad",
        "node50: a rail of it is dead",
        "node5: one path of it is bad",
        "node6: a rail of it is slow",
    ]
    assert styles(root, "rect").count("leaf-box") == 8
    good = next(one for one in root.iter(f"{SVG}path") if one.get("class") == "at-2")
    assert good.get("d", "").count("M") == 60


PICTURES = {
    "one": made_network(1, leaves=0),
    "two": made_network(2, leaves=0),
    "twelve": made_network(12, leaves=4, rails=("eth0", "eth1", "ib0", "ib1", "ib2", "ib3", "ib4"),
                           dead={("node3", "ib2")}),
    "bad": made_network(10, leaves=3, cut={(f"node{a}", f"node{a + 1}", "eth0") for a in range(9)}),
    "thirteen": made_network(13, leaves=5),
    "flat": made_network(700, leaves=0, every=211),
    "large": made_network(4096, leaves=256, every=1009, slow={("node77", "eth0")}),
}  # fmt: skip


@pytest.mark.parametrize("name", PICTURES)
def test_all_of_the_picture_is_within_it(name: str) -> None:
    root = drawn(PICTURES[name])
    width, height = (float(one) for one in root.get("viewBox", "").split()[2:])
    for one in root.iter(f"{SVG}text"):
        x, wide = float(one.get("x", "-1")), width_of(one.text or "", 11.5)
        ends = {"middle": wide / 2, "end": 0.0}.get(one.get("text-anchor", ""), wide)
        assert x - wide + ends >= 0, one.text
        assert x + ends <= width, one.text
        assert 0 <= float(one.get("y", "-1")) <= height
    for one in root.iter(f"{SVG}rect"):
        assert 0 <= float(one.get("x", "-1")) <= width - float(one.get("width", "0"))
        assert 0 <= float(one.get("y", "-1")) <= height - float(one.get("height", "0"))


# --- files ------------------------------------------------------------------------------------


def test_files_are_whole_and_need_nothing_else(kept: Path, tmp_path: Path) -> None:
    kept.write_text(json.dumps(made_network(6, dead={("node3", "eth1")})))
    svg, html = tmp_path / "x.svg", tmp_path / "x.html"
    reported = run("--svg", str(svg), "--html", str(html))
    assert reported.endswith(f"{svg}\n{html}\n")
    style = ElementTree.fromstring(svg.read_text()).find(f"{SVG}style")
    assert style is not None
    assert ".link-slow{stroke:#e06a14" in (style.text or "")
    assert "var(" not in (style.text or "")
    page = html.read_text()
    assert "<svg" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert "<strong>dead</strong>" in page
    assert "6 nodes, 2 rails" in page


def test_a_page_of_thousands_of_nodes_is_small(kept: Path) -> None:
    kept.write_text(json.dumps(PICTURES["large"] | {"coverage": 0.001}))
    page = run("--html", "-")
    assert page.startswith("<!doctype html>")
    assert len(page) < MAX_BYTES
    assert "node77" in page


def test_words_of_a_run_do_nothing(kept: Path) -> None:
    text = json.dumps(made_network(3, leaves=2, dead={("node1", "eth1")}))
    for word in ("node1", "leaf0", "eth1", "no answer"):
        text = text.replace(word, json.dumps(word + HOSTILE)[1:-1])
    kept.write_text(text)
    page = run("--html", "-")
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    run()


def test_one_document_can_have_stdout(kept: Path) -> None:
    kept.write_text(json.dumps(made_network(3)))
    assert ElementTree.fromstring(run("--svg", "-")).tag == f"{SVG}svg"
    with pytest.raises(UsageError):
        run("--svg", "-", "--html", "-")
