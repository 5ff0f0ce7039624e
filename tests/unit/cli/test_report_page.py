"""A page is one file, small, valid, and safe for any text in the journal."""

import json
import re
from html.parser import HTMLParser

import pytest
from made_journals import MadeJournal, long_run

from ftrun.tools.report.render.page import MAX_BYTES, incident_page, run_page
from ftrun.tools.report.run import incident_by, run_facts

VOID = {"meta", "link", "br", "img", "input", "hr"}
HOSTILE = [
    "</script><script>alert(1)</script>",
    "]]><svg onload=alert(1)>",
    '"><img src=x onerror=alert(1)>',
    "'><style>*{display:none}</style>",
    "</title></style></pre><iframe src=http://example.org>",
    "{{ 7 * 7 }}{% for x in y %}",
    "&lt;b&gt;&#x3c;script&#x3e;",
    "javascript:alert(1)//http://example.org/x.png",
    "\u202eevil\u2066\u0000\x1b]0;title\x07",
    "\ud800\udfff lone",
    "\u05d0\u05d1\u05d2 \u0627\u0644\u0639",
    "\n\n\n" * 50,
]


class Elements(HTMLParser):
    """The content of a page; reports elements that are not closed."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[str] = []
        self.tags: dict[str, int] = {}
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.stack.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.stack, f"</{tag}> closes nothing"
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def pages_of(raw: list[bytes]) -> dict[str, str]:
    facts = run_facts(raw, name="x")
    found = {"run": run_page(facts, source="journal.jsonl", made_t_s=1.8e9)}
    for it in facts.incidents:
        name = f"incident {it.number}"
        found[name] = incident_page(facts, it, source="journal.jsonl", made_t_s=1.8e9)
    return found


def assert_needs_nothing(page: str) -> None:
    """No script, nothing to load, no active element; links only to pages in the same folder."""
    elements = Elements(page)
    assert not {"script", "iframe", "object", "embed", "img", "form", "base"} & set(elements.tags)
    for tag, name, value in elements.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("src", "action", "formaction", "srcdoc", "style", "xlink:href"):
            raise AssertionError((tag, name, value))
        if name == "href":
            assert value == "data:," or re.fullmatch(r"report\.html|incident-\d+\.html", value)
    _, _, rest = page.partition("<style>")
    sheet, _, _ = rest.partition("</style>")
    assert "url(" not in sheet
    assert "@import" not in sheet
    assert len(page.encode()) <= MAX_BYTES


def corrupted(value: object, words: str) -> object:
    """Every text in it gets the hostile text too; kinds of lines and names of fields stay."""
    if isinstance(value, str):
        return value + words
    if isinstance(value, list):
        return [corrupted(one, words) for one in value]
    if isinstance(value, dict):
        keep = ("kind", "action", "old", "new", "confidence", "sender", "receiver")
        return {key: one if key in keep else corrupted(one, words) for key, one in value.items()}
    return value


def test_pages_of_a_usual_run() -> None:
    pages = pages_of(long_run(ranks=32, nodes=8).raw())
    assert len(pages) == 4
    for page in pages.values():
        assert_needs_nothing(page)
        assert len(page.encode()) < 60_000


def test_every_picture_has_a_title_a_description_and_a_role() -> None:
    for page in pages_of(long_run(ranks=32, nodes=8).raw()).values():
        pictures = re.findall(r"<svg [^>]*>(?:<title[^>]*>[^<]+</title><desc[^>]*>[^<]+)?", page)
        for one in pictures:
            assert 'aria-hidden="true"' in one or ('role="img"' in one and "</title><desc" in one)
        names = re.findall(r' id="([^"]+)"', page)
        assert len(names) == len(set(names))


@pytest.mark.parametrize("words", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_words_stay_words(words: str) -> None:
    raw = [json.dumps(corrupted(one, words)).encode() for one in long_run().entries]
    plain = pages_of(long_run().raw())
    for name, page in pages_of(raw).items():
        assert_needs_nothing(page)
        assert not re.search(
            r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", page
        )
        assert set(Elements(page).tags) <= set(Elements(plain[name]).tags) | {"ul", "li"}


def test_hostile_bytes_and_lines_of_any_length() -> None:
    made = long_run()
    raw = made.raw()
    raw[3:3] = [b"\xff" * 100_000 + b"\n", b'{"time": 1, "kind": "\xff\xfe"}\n', b"[" * 100_000]
    long_text = "<" * 100_000
    for entry in made.entries[:]:
        if entry["kind"] in ("workers_exited", "verdict", "incident_closed", "workers_killed"):
            raw.append(json.dumps(corrupted(entry, long_text)).encode())
    for page in pages_of(raw).values():
        assert_needs_nothing(page)


@pytest.mark.slow
def test_a_run_with_thousands_of_incidents_fits() -> None:
    made = MadeJournal(run_id='"' * 100)
    made.begin()
    for number in range(1500):
        made.crash(60.0 + 10 * number, 100 + 40 * number, number % 8)
    made.end(20_000.0)
    facts = run_facts(made.raw())
    assert len(facts.incidents) == 1500
    page = run_page(facts, source="journal.jsonl", made_t_s=1.8e9)
    assert_needs_nothing(page)
    assert "The newest 200 of 1500." in page


@pytest.mark.slow
def test_hundreds_of_ranks_and_a_matrix_of_64_nodes_fit() -> None:
    facts = run_facts(long_run(ranks=512, nodes=64).raw())
    for it in facts.incidents:
        page = incident_page(facts, it, source="journal.jsonl", made_t_s=1.8e9)
        assert_needs_nothing(page)
    assert "ranks 0-2, 4-511 (511)" in incident_page(
        facts, incident_by(facts, "1"), source="journal.jsonl", made_t_s=1.8e9
    )


def test_what_is_not_known_is_reported() -> None:
    made = MadeJournal(ranks=1, nodes=1)
    made.put(
        0.0, "suspicion_raised", incident=1, text="", ranks=[], unresponsive_s=0.0, deadline_s=9.0
    )
    pages = pages_of(made.raw())
    assert "not known" in pages["run"]
    assert_needs_nothing(pages["incident 1"])


def test_links_only_where_the_other_page_is_next_to_it() -> None:
    facts = run_facts(long_run().raw())
    alone = run_page(facts, source="j", made_t_s=1.8e9, links=False)
    assert 'href="incident' not in alone
    assert "ftrun report" in alone
    it = facts.incidents[0]
    assert 'href="report.html"' in incident_page(facts, it, source="j", made_t_s=1.8e9)
    assert 'href="report' not in incident_page(facts, it, source="j", made_t_s=1.8e9, links=False)
