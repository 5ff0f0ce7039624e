"""The pages: values into one HTML file that needs nothing else.

Rule 1: what is put into a page is escaped by the template engine or by `report_svg`; no template
        switches that off.
Rule 2: no page is above `MAX_BYTES`, whatever the journal holds: long texts are cut, and long
        lists are replaced by their number.
Rule 3: no script, no address outside of the page; the page says so to the browser too.
"""

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ftrun import __version__
from ftrun.cli.screen import text as words
from ftrun.errors import InternalError
from ftrun.tools.report.costs import GOODPUT_MEANS
from ftrun.tools.report.facts import IncidentFacts, NodeFacts, RunFacts
from ftrun.tools.report.render import charts

MAX_BYTES = 300_000
_TEMPLATES = Path(__file__).parent / "pages"
_FEW_NODES = 16
_SHARES = (1.0, 0.5, 0.2, 0.05)
"""Of the usual length of texts and lists; the first with which a page fits is taken."""


def picture_style() -> str:
    """The style of a picture in its own file, without variables, which some viewers lack."""
    text = (_TEMPLATES / "report.css").read_text(encoding="utf-8")
    colours = dict(re.findall(r"--([\w-]+):([^;}]+)", text.partition("}")[0]))
    screen = text.partition("@media print")[0]
    rules = re.findall(r"(?:svg|\.)[^{}]*\{[^{}]*\}", screen)
    return re.sub(r"var\(--([\w-]+)\)", lambda seen: colours[seen[1]], "\n".join(rules))


def incident_name(number: int) -> str:
    return f"incident-{number:04d}.html"


RUN_NAME = "report.html"


def run_page(run: RunFacts, *, source: str, made_t_s: float, links: bool = True) -> str:
    """`links`: the pages of the incidents are in the same folder."""

    def values(share: float) -> dict[str, Any]:
        return {
            "run": run,
            "links": links,
            "shares": charts.shares(run),
            "progress": charts.progress(run),
            "has_pulses": not any("progress lines" in note for note in run.notes),
            "shown": run.incidents[-max(int(200 * share), 5) :],
            "nodes": _reporting(run.nodes, max(int(100 * share), 10)),
            "href_of": incident_name,
            "goodput_means": GOODPUT_MEANS,
        }

    return fitted_page("run.html", values, source=source, made_t_s=made_t_s)


def incident_page(
    run: RunFacts, it: IncidentFacts, *, source: str, made_t_s: float, links: bool = True
) -> str:
    """The page of one of its incidents; `links`: the page of the run is in the same folder."""

    def values(share: float) -> dict[str, Any]:
        used = {bar.style for row in it.rows for bar in row.bars}
        return {
            "run": run,
            "links": links,
            "it": it,
            "place": [one.number for one in run.incidents].index(it.number) + 1,
            "timeline": charts.timeline(it),
            "strip": charts.strip(it),
            "heat": charts.heat_map(it.delays) if it.delays is not None else None,
            "states": [one for one in charts.STATES if one[0] in used],
            "broken": charts.axis_of(it).is_broken,
            "run_href": RUN_NAME,
        }

    return fitted_page("incident.html", values, source=source, made_t_s=made_t_s)


def _reporting(nodes: Sequence[NodeFacts], most: int) -> list[NodeFacts]:
    """All of a few; of many only those that were blamed."""
    if len(nodes) <= _FEW_NODES:
        return list(nodes)
    blamed = sorted((one for one in nodes if one.blamed), key=lambda one: -one.blamed)[:most]
    return blamed or list(nodes[:_FEW_NODES])


def fitted_page(
    template: str, values: Callable[[float], dict[str, Any]], *, source: str, made_t_s: float
) -> str:
    """A template with the values for the largest share of texts and lists that fits."""
    for share in _SHARES:
        loaded = _environment(share).get_template(template)
        page = loaded.render(
            version=__version__, source=source, made_at=words.when(made_t_s), **values(share)
        )
        if len(page.encode("utf-8", "replace")) <= MAX_BYTES:
            return page
    raise InternalError(f"{template} does not fit into {MAX_BYTES:,} bytes")


@functools.cache
def _environment(share: float) -> Environment:
    """Templates are compiled once: a run may have hundreds of incidents."""
    found = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def short(text: object, limit: int) -> str:
        shown, most = str(text), max(int(limit * share), 16)
        return shown if len(shown) <= most else f"{shown[: most - 1]}\u2026"

    found.filters.update(
        short=short,
        duration=words.duration,
        soon=lambda seconds: "at once" if 0 <= seconds < 1e-3 else words.duration(seconds),
        when=words.when,
        clock=lambda t_s: words.when(t_s)[5:19],
        milli=lambda t_s: f"{words.clock(t_s)}.{int(t_s * 1000) % 1000:03d}",
        percent=words.percent,
        count=words.count,
        ranks=words.ranks,
        ranges=words.ranges,
        rank_time=_rank_time,
        subject=_subject,
    )
    return found


def _rank_time(seconds: float | None, ranks: int | None) -> str:
    if seconds is None or ranks is None:
        return words.NOT_KNOWN
    total = seconds * ranks
    return f"{total:.3g} rank-s" if total < 600 else f"{total / 3600:,.3g} rank-h"


def _subject(one: IncidentFacts) -> str:
    named = ", ".join([*([words.ranks(one.culprits)] if one.culprits else []), *one.nodes[:3]])
    return named or ("planned" if one.is_planned else "no rank named")
