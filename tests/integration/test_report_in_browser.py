"""Pages of `ftrun report` and `ftrun network` in a real browser: nothing is fetched or overlaps.

Without chromium the tests are skipped, with a reason.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from headless_browser import Browser, Page, found
from made_journals import long_run
from made_networks import made_network

from ftrun.journal import NETWORK_NAME
from ftrun.tools.network_view.command import network
from ftrun.tools.report.command import report

JOURNALS = Path(__file__).parents[1] / "unit" / "cli" / "journals"
PAGES = [
    "one-node-two-kills/report.html",
    "one-node-two-kills/incident-0001.html",
    "node-without-power/incident-0001.html",
    "launcher-killed/report.html",
    "hang-found/incident-0001.html",
    "made/report.html",
    "made/incident-0001.html",
    "made/incident-0002.html",
    "many-ranks/incident-0001.html",
    "many-ranks/incident-0002.html",
    "hostile/report.html",
    "hostile/incident-0001.html",
    "few-nodes/network.html",
    "single-roads/network.html",
    "many-nodes/network.html",
]
NETWORKS = {
    "few-nodes": made_network(8, between=0.4, slow={("node6", "eth1")}, dead={("node1", "eth1")}),
    "single-roads": made_network(12, leaves=6, cut={("node1", "node4", "eth0")}),
    "many-nodes": made_network(96, leaves=12, dead={("node9", "eth0")}, every=5),
}
WORDS = '</script><script>alert(1)</script>"><img src=http://example.org/x onerror=alert(2)>'

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(found() is None, reason="no browser here: apt-get install chromium"),
]

TEXTS = """[...document.querySelectorAll('svg')].map(svg => [
  svg.getBoundingClientRect(), ...[...svg.querySelectorAll('text')].map(t => {
    const r = t.getBoundingClientRect();
    return {x: r.x, y: r.y, width: r.width, height: r.height, words: t.textContent};
  })].map(r => ({x: r.x, y: r.y, width: r.width, height: r.height, words: r.words || ''})))"""

CONTRAST = """(() => {
  const light = text => {
    const [r, g, b] = text.match(/[0-9.]+/g).map(Number).map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = light(getComputedStyle(document.body).backgroundColor);
  const found = {};
  for (const one of document.querySelectorAll('body, p, li, dt, dd, td, th, a, summary, .tick')) {
    const style = getComputedStyle(one);
    const ink = light(one.classList.contains('tick') ? style.fill : style.color);
    found[one.tagName + '.' + (one.getAttribute('class') || '')] =
      (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
  }
  return found;
})()"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages of recorded and of handwritten journals, as the command writes them."""
    root = tmp_path_factory.mktemp("pages")
    raw = {path.stem: path.read_bytes() for path in JOURNALS.glob("*.jsonl")}
    raw["made"] = b"".join(long_run(ranks=32, nodes=8).raw())
    raw["many-ranks"] = b"".join(long_run(ranks=512, nodes=64).raw())
    text = b"".join(long_run().raw())
    escaped = WORDS.replace("\\", "\\\\").replace('"', '\\"').encode()
    for reported in (b"stopped answering", b"node0", b"all_reduce", b"train.py", b"forward"):
        text = text.replace(reported, reported + escaped)
    raw["hostile"] = text
    for name, data in raw.items():
        (root / name).mkdir()
        (root / name / "journal.jsonl").write_bytes(data)
        report(None, run=str(root / name))
    for name, document in NETWORKS.items():
        (root / name).mkdir()
        (root / name / "journal.jsonl").write_bytes(raw["one-node-two-kills"])
        (root / name / NETWORK_NAME).write_text(json.dumps(document))
        network(str(root / name), html=str(root / name / "network.html"))
    return root


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


def assert_quiet(page: Page, path: Path) -> None:
    assert page.requests == [path.as_uri()]
    assert page.complaints == []


def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether the boxes of two texts overlap by more than the empty rim of a line of text."""
    wide = min(one["x"] + one["width"], other["x"] + other["width"]) - max(one["x"], other["x"])
    high = min(one["y"] + one["height"], other["y"] + other["height"]) - max(one["y"], other["y"])
    return bool(wide > 1 and high > 4)


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_page_fetches_nothing_and_can_be_read(
    browser: Browser, folder: Path, tmp_path: Path, name: str, dark: bool
) -> None:
    page = browser.open(folder / name, dark=dark)
    picture = tmp_path / "page.png"
    page.picture(picture)
    assert picture.stat().st_size > 20_000
    assert_quiet(page, folder / name)
    weak = {what: ratio for what, ratio in page.value(CONTRAST).items() if ratio < 4.5}
    assert weak == {}
    assert page.value("document.querySelectorAll('h1').length") == 1


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [1100, 480, 340])
def test_no_text_covers_another_and_the_page_is_as_wide_as_the_window(
    browser: Browser, folder: Path, name: str, width: int
) -> None:
    page = browser.open(folder / name, width=width)
    assert page.value("document.documentElement.scrollWidth") <= width
    for frame, *texts in page.value(TEXTS):
        for one in texts:
            inside = one["x"] >= frame["x"] - 1 and (
                one["x"] + one["width"] <= frame["x"] + frame["width"] + 1
            )
            assert inside, f"{one['words']} is cut off"
        pairs = itertools.combinations(texts, 2)
        assert [(a["words"], b["words"]) for a, b in pairs if overlap(a, b)] == []


def test_a_page_can_be_printed(browser: Browser, folder: Path, tmp_path: Path) -> None:
    page = browser.open(folder / "made/incident-0001.html", dark=True, media="print")
    assert page.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.print_to(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


def test_pictures_have_text_for_users_that_cannot_see_them(browser: Browser, folder: Path) -> None:
    page = browser.open(folder / "made/incident-0001.html")
    nodes = page.ask("Accessibility.getFullAXTree")["nodes"]
    # Chromium's accessibility tree has image or graphic for SVG with role=img.
    reported = {
        node["name"]["value"]: node.get("description", {}).get("value", "")
        for node in nodes
        if node.get("role", {}).get("value") in ("image", "img", "graphics-document")
    }
    assert "Timeline of the incident" in " ".join(reported)
    assert "detect: 12.1 s" in " ".join([*reported, *reported.values()])


def test_words_from_a_journal_do_nothing(browser: Browser, folder: Path) -> None:
    path = folder / "hostile/incident-0001.html"
    page = browser.open(path)
    page.value("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert_quiet(page, path)
    assert "<script>alert(1)</script>" in page.value("document.body.innerText")
    assert page.value("document.scripts.length + document.images.length") == 0
