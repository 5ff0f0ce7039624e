"""Implements `ftrun estimate`: the expected cost of failures, and the resulting choices.

Runs in:  cli. It starts and queries no process.
Takes in: numbers of nodes, assumptions, and optionally the journal of a run.
Gives:    tables and text; a picture, a page or JSON.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ftrun import clock
from ftrun.cli.screen.atomic_output import is_stdout, write_out
from ftrun.erasure.codec import MAX_DATA, MAX_PARITY
from ftrun.errors import ExitCode, UsageError
from ftrun.tools.estimate import text as words
from ftrun.tools.estimate.assumptions import ABOUT, Assumptions, flag_of, problems
from ftrun.tools.estimate.estimate_run import measured_in, nothing_measured
from ftrun.tools.estimate.outlook import MAX_NODES, FixedChoices, Outlook, outlook
from ftrun.tools.report.report_logs import folder_of, is_alive, raw_lines
from ftrun.tools.report.run import run_facts

_MOST_POINTS = 64


@dataclass(frozen=True, slots=True)
class EstimateRequest:
    """The request as typed.

    Args:
        values: assumptions that were given.
        nodes: see `node_counts`.
        run: a run id, a folder of logs, or `last`; None: no run.
        code: K+M; None: choose one.
        snapshot_every: steps; None: choose.
        spares: number of spares; None: choose.
        svg: file for the picture.
        html: file for the page.
        as_json: print one JSON document instead of tables.
    """

    nodes: str
    values: Mapping[str, float]
    run: str | None = None
    code: str | None = None
    snapshot_every: int | None = None
    spares: int | None = None
    svg: str | None = None
    html: str | None = None
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class Estimate:
    """The complete result."""

    outlooks: Sequence[Outlook]
    given: Assumptions
    origins: Mapping[str, str]
    """The source of each assumption's value."""
    notes: Sequence[str]


def estimate(wanted: EstimateRequest) -> int:
    named = ((wanted.svg, "--svg"), (wanted.html, "--html"))
    files = [("-" if _is_stdout(path) else path, flag) for path, flag in named if path]
    has_stdout = [path for path, _ in files].count("-") + wanted.as_json
    if has_stdout > 1:
        raise UsageError(
            "one of --json, --svg - and --html - can have stdout. Name files for the others"
        )
    made = estimated(wanted)
    for path, flag in files:
        write_out(path, _svg(made) if flag == "--svg" else _html(made), flag=flag)
    if wanted.as_json:
        write_out(None, json.dumps(_document(made), indent=1) + "\n")
    elif not has_stdout:
        _show(made)
        write_out(None, "".join(f"{path}\n" for path, _ in files))
    return ExitCode.DONE


def estimated(wanted: EstimateRequest) -> Estimate:
    nodes = node_counts(wanted.nodes)
    decided = FixedChoices(
        code=_code(wanted.code, nodes[0]) if wanted.code is not None else None,
        every=_at_least(1, wanted.snapshot_every, "--snapshot-every"),
        spares=_at_least(0, wanted.spares, "--spares"),
    )
    values: dict[str, Any] = {}
    origins = {name: f"default: {about.source}" for name, about in ABOUT.items()}
    notes = []
    if wanted.run is not None:
        folder = folder_of(None if wanted.run == "last" else wanted.run, below=Path.cwd())
        facts = run_facts(raw_lines(folder), name=folder.name, is_alive=is_alive(folder.name))
        found = measured_in(facts)
        values = {name: one.value for name, one in found.items()}
        origins |= {name: f"run {facts.run_id}: {one.how}" for name, one in found.items()}
        notes = [note] if (note := nothing_measured(facts, list(found))) else []
    values |= wanted.values
    origins |= dict.fromkeys(wanted.values, "given")
    given = Assumptions(**values)
    if wrong := problems(given):
        raise UsageError("; ".join(wrong))
    outlooks = [outlook(count, given, decided) for count in nodes]
    return Estimate(outlooks, given, origins, notes)


def node_counts(text: str) -> list[int]:
    """Parses `64`, `16..16384` (doubled from the first to the last), `16,64,1000`; sorted.

    Raises:
        UsageError: the text has none of these forms, or a number is out of range.
    """
    found: set[int] = set()
    for part in text.split(","):
        seen = re.fullmatch(r"\s*(\d{1,9})\s*(?:\.\.\s*(\d{1,9})\s*)?", part)
        if seen is None:
            raise UsageError(
                f"--nodes {text}: {part!r} is neither a number nor a range, as 64 or 16..16384"
            )
        low, high = int(seen[1]), int(seen[2] or seen[1])
        if low > high:
            raise UsageError(f"--nodes {part}: {low} is above {high}; a range is MIN..MAX")
        if low < 1 or high > MAX_NODES:
            raise UsageError(f"--nodes {part}: from 1 to {MAX_NODES:,} nodes can be looked at")
        while low < high:
            found.add(low)
            low *= 2
        found.add(high)
    if len(found) > _MOST_POINTS:
        raise UsageError(
            f"--nodes names {len(found)} numbers; {_MOST_POINTS} are looked at at once"
        )
    return sorted(found)


def _code(text: str, fewest: int) -> tuple[int, int]:
    seen = re.fullmatch(r"(\d{1,4})\+(\d{1,4})", text)
    if seen is None:
        raise UsageError(f"--code {text} is not K+M, such as 6+2")
    data, parity = int(seen[1]), int(seen[2])
    if not (1 <= data <= MAX_DATA and 1 <= parity <= MAX_PARITY):
        raise UsageError(f"--code {text}: K is 1 to {MAX_DATA}, M 1 to {MAX_PARITY}")
    if data + parity > fewest:
        raise UsageError(
            f"--code {text} needs {data + parity} nodes, and --nodes begins at {fewest}. Begin at "
            f"{data + parity}, or give a smaller code"
        )
    return data, parity


def _at_least(least: int, value: int | None, flag: str) -> int | None:
    if value is not None and value < least:
        raise UsageError(f"{flag} {value}: at least {least} can be")
    return value


def _is_stdout(path: str) -> bool:
    return path == "-" or is_stdout(path)


# --- showing ----------------------------------------------------------------------------------


def _show(made: Estimate) -> None:
    # Imported here, because JSON and files need no tables.
    from ftrun.cli.screen import terminal as render

    render.show_table(words.head(made.given), [words.row(one, made.given) for one in made.outlooks])
    last = made.outlooks[-1]
    render.write_plain(f"\n{words.code_title(last, made.given)}:\n")
    render.show_table(words.CODE_HEAD, [words.code_row(code) for code in last.codes])
    render.write_plain(f"\nFor {last.nodes:,} nodes:\n")
    render.show_pairs(words.advice(last, made.given))
    render.write_plain("")
    for line in _lines(made):
        render.write_plain(line)


def _lines(made: Estimate) -> list[str]:
    """Lists the assumptions that were used, and the limits of the model."""
    found = [f"taken: {one}" for one in _changed(made)]
    at_default = sum(origin.startswith("default") for origin in made.origins.values())
    found.append(
        f"taken: {at_default} assumptions at their defaults; ftrun estimate --help says each, and "
        "where it is from"
    )
    found += [f"note: {note}" for note in made.notes]
    return found + [f"note: {one}" for one in words.caveats(made.outlooks, made.given)]


def _changed(made: Estimate) -> list[str]:
    return [
        f"{flag_of(name)} {getattr(made.given, name):.6g} ({origin})"
        for name, origin in made.origins.items()
        if not origin.startswith("default")
    ]


def _svg(made: Estimate) -> str:
    from ftrun.tools.estimate.estimate_picture import picture
    from ftrun.tools.report.render.page import picture_style

    return f"{picture(made.outlooks, picture_style())}\n"


def _html(made: Estimate) -> str:
    from ftrun.tools.estimate.estimate_picture import picture
    from ftrun.tools.report.render.page import fitted_page

    last = made.outlooks[-1]

    def values(_share: float) -> dict[str, Any]:
        return {
            "picture": picture(made.outlooks),
            "head": words.head(made.given),
            "rows": [words.row(one, made.given) for one in made.outlooks],
            "code_title": words.code_title(last, made.given),
            "code_head": words.CODE_HEAD,
            "code_rows": [words.code_row(code) for code in last.codes],
            "nodes": last.nodes,
            "advice": words.advice(last, made.given),
            "assumptions": _assumptions(made),
            "notes": [*made.notes, *words.caveats(made.outlooks, made.given)],
        }

    return fitted_page("estimate.html", values, source="ftrun estimate", made_t_s=clock.wall_s())


def _assumptions(made: Estimate) -> list[dict[str, Any]]:
    return [
        {
            "flag": flag_of(field.name),
            "value": getattr(made.given, field.name),
            "unit": ABOUT[field.name].unit,
            "meaning": ABOUT[field.name].meaning,
            "origin": made.origins[field.name],
        }
        for field in fields(made.given)
    ]


def _document(made: Estimate) -> dict[str, Any]:
    last = made.outlooks[-1]
    return {
        "assumptions": _assumptions(made),
        "nodes": [_plain(asdict(one) | {"code": one.code.name}) for one in made.outlooks],
        "advice": {"nodes": last.nodes, **dict(words.advice(last, made.given))},
        "notes": [*made.notes, *words.caveats(made.outlooks, made.given)],
    }


def _plain(value: Any) -> Any:
    """Replaces infinity by None, because JSON has no infinity."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
