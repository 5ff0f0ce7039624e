"""`ftrun estimate`: the expected cost of failures, and the resulting choices.

It starts and queries no process.
"""

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import typer
from typer.core import TyperCommand

from ftrun import clock
from ftrun.cli.app import help_rows, help_width
from ftrun.cli.completion import option, parameter, with_parameters
from ftrun.cli.screen import terminal as render
from ftrun.cli.screen.atomic_output import requested_files, write_outputs
from ftrun.cli.screen.text import count
from ftrun.erasure.codec import MAX_DATA, MAX_PARITY
from ftrun.errors import UsageError
from ftrun.tools.estimate import text as words
from ftrun.tools.estimate.assumptions import ABOUT, Assumptions, flag_of, problems
from ftrun.tools.estimate.outlook import MAX_NODES, MIRROR, FixedChoices, Outlook, outlook
from ftrun.tools.report.command import folder_of, is_alive, raw_lines
from ftrun.tools.report.costs import HANGS
from ftrun.tools.report.facts import IncidentFacts, RunFacts
from ftrun.tools.report.incident.ranks import slow_kind
from ftrun.tools.report.render.page import fitted_page, picture_style
from ftrun.tools.report.run import run_facts

DEFAULT_NODES = "16..16384"
_MOST_POINTS = 64
_NODES_LOST = ("node lost", "lead lost")

_OWN: Mapping[str, tuple[Any, str, str]] = {
    "nodes": (str, "N|MIN..MAX|N,N", "number of nodes that train; a range is doubled from MIN to "
              f"MAX. Default {DEFAULT_NODES}"),
    "run": (str, "RUN", "use ftrun's costs from the journal of this run: run id, or folder of its "
            "logs; `last`: the newest journal"),
    "code": (str, "K+M|mirror", "evaluate this code instead of choosing one"),
    "snapshot_every": (int, "STEPS", "evaluate this interval instead of choosing one"),
    "spares": (int, "N", "evaluate this number of spares instead of choosing one"),
    "svg": (str, "FILE", "the picture, as a separate file; - for stdout"),
    "html": (str, "FILE", "everything as one page; - for stdout"),
    "json": (bool, "", "everything as one JSON document, with every assumption and its source"),
}  # fmt: skip

_INTRO = """\
Usage: ftrun estimate [OPTIONS]

Estimate what failures will cost a run of a given size, and choose k + m, interval and spares.
Nothing is started. Three strategies are compared: checkpoints at their best interval with a restart
of the whole job; the same, but ftrun detects the failures; snapshots in memory under ftrun.

Examples:
  ftrun estimate                                     16 to 16,384 nodes, all assumptions as below
  ftrun estimate --nodes 2048 --days 54 --state-gb 3 --step 15
  ftrun estimate --run last --nodes 64..1024         with the costs that were measured in your run
  ftrun estimate --svg goodput.svg

Every assumption is an option, with its default and the source of the default. If the source is a
guess, give your own value. docs/estimate.md has the formulas.
"""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The complete result; `origins` has the source of each assumption's value."""

    outlooks: Sequence[Outlook]
    given: Assumptions
    origins: Mapping[str, str]
    notes: Sequence[str]


def estimated(
    nodes_text: str,
    given_values: Mapping[str, float],
    *,
    run: str | None = None,
    code: str | None = None,
    snapshot_every: int | None = None,
    spares: int | None = None,
) -> Estimate:
    """`given_values` are the assumptions that were given; a choice that is None is made here."""
    nodes = node_counts(nodes_text)
    decided = FixedChoices(
        code=_code(code, nodes[0]) if code is not None else None,
        every=_at_least(1, snapshot_every, "--snapshot-every"),
        spares=_at_least(0, spares, "--spares"),
    )
    values: dict[str, Any] = {}
    origins = {name: f"default: {about.source}" for name, about in ABOUT.items()}
    notes = []
    if run is not None:
        folder = folder_of(None if run == "last" else run, below=Path.cwd())
        facts = run_facts(raw_lines(folder), name=folder.name, is_alive=is_alive(folder.name))
        found = measured_in(facts)
        values = {name: one.value for name, one in found.items()}
        origins |= {name: f"run {facts.run_id}: {one.how}" for name, one in found.items()}
        notes = [note] if (note := nothing_measured(facts, list(found))) else []
    values |= given_values
    origins |= dict.fromkeys(given_values, "given")
    given = Assumptions(**values)
    if wrong := problems(given):
        raise UsageError("; ".join(wrong))
    outlooks = [outlook(one, given, decided) for one in nodes]
    return Estimate(outlooks, given, origins, [*notes, *words.caveats(outlooks, given)])


def node_counts(text: str) -> list[int]:
    """Parses `64`, `16..16384` (doubled from the first to the last), `16,64,1000`; sorted."""
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
            raise UsageError(f"--nodes {part}: the number of nodes is from 1 to {MAX_NODES:,}")
        while low < high:
            found.add(low)
            low *= 2
        found.add(high)
    if len(found) > _MOST_POINTS:
        raise UsageError(f"--nodes names {len(found)} numbers; {_MOST_POINTS} is the limit")
    return sorted(found)


def _code(text: str, fewest: int) -> tuple[int, int]:
    if text == "mirror":
        if fewest < 2:
            raise UsageError(f"--code mirror needs 2 nodes, and --nodes begins at {fewest}")
        return MIRROR
    seen = re.fullmatch(r"(\d{1,4})\+(\d{1,4})", text)
    if seen is None:
        raise UsageError(f"--code {text} is neither K+M, such as 6+2, nor mirror")
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
        raise UsageError(f"{flag} is at least {least}, not {value}")
    return value


# --- costs of a run ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeasuredValue:
    """A value and its method, as words that follow `of run X:`."""

    value: float
    how: str


def measured_in(facts: RunFacts) -> dict[str, MeasuredValue]:
    """Returns the fields of `Assumptions` that the run measures.

    The failure rate is not measured, because a few failures have little significance. Failures
    injected by `ftrun inject-fault` count, because they cost the same as others.
    """
    found: dict[str, MeasuredValue] = {}
    if facts.step_s:
        found["step_s"] = MeasuredValue(facts.step_s, "median of its steps")
    if (snapshots := facts.snapshots) is not None and snapshots.taken > 0:
        how = f"mean of {count(snapshots.taken, 'snapshot')}: training was blocked"
        found["snapshot_cost_s"] = MeasuredValue(snapshots.blocked_s / snapshots.taken, how)
    over = [one for one in facts.incidents if _counts(one)]
    hung = [one for one in over if one.kind in HANGS]
    lost = [one for one in over if one.kind in _NODES_LOST]
    ended = [one for one in over if one not in hung and one not in lost]
    for name, incidents, what in (
        ("crash_detect_s", ended, "ended rank"),
        ("hang_detect_s", hung, "hang"),
        ("node_detect_s", lost, "lost node"),
    ):
        # 0: the journal has no line from before the detection.
        if took_s := [one.noticed_s for one in incidents if one.noticed_s > 0]:
            found[name] = MeasuredValue(median(took_s), f"median of {count(len(took_s), what)}")
    # The restart of a lost node includes the fetch of its state, which is a separate assumption.
    if restarted := ended + hung or lost:
        how = f"median of {count(len(restarted), 'restart')}"
        took = [(one.recovered_s or 0.0) - one.noticed_s - one.paused_s for one in restarted]
        found["restart_s"] = MeasuredValue(median(max(one, 0.0) for one in took), how)
        found["restart_more_s"] = MeasuredValue(0.0, "included in --restart of that run")
    return found


def _counts(one: IncidentFacts) -> bool:
    is_over = one.recovered_s is not None and not one.is_reported
    return is_over and not one.is_planned and not slow_kind(one.kind)


def nothing_measured(facts: RunFacts, found: Sequence[str]) -> str:
    missing = {
        "snapshot_cost_s": "the cost of a snapshot (no Pulse line, or none was taken)",
        "restart_s": "the cost of a restart (no failure was survived)",
    }
    texts = [what for name, what in missing.items() if name not in found]
    return f"run {facts.run_id} does not measure {' or '.join(texts)}" if texts else ""


# --- output -----------------------------------------------------------------------------------


def _show(made: Estimate) -> None:
    render.show_table(words.head(made.given), [words.row(one, made.given) for one in made.outlooks])
    last = made.outlooks[-1]
    render.write_plain(f"\n{words.code_title(last, made.given)}:\n")
    render.show_table(words.CODE_HEAD, [words.code_row(code) for code in last.codes])
    render.write_plain(f"\nFor {last.nodes:,} nodes:\n")
    render.show_pairs(words.advice(last, made.given))
    render.write_plain("")
    at_default = 0
    for name, origin in made.origins.items():
        if origin.startswith("default"):
            at_default += 1
        else:
            value = getattr(made.given, name)
            render.write_plain(f"assumed: {flag_of(name)} {value:.6g} ({origin})")
    render.write_plain(
        f"assumed: defaults of {at_default} assumptions; ftrun estimate --help lists them with "
        "their sources"
    )
    for note in made.notes:
        render.write_plain(f"note: {note}")


def _html(made: Estimate) -> str:
    last = made.outlooks[-1]

    def values(_share: float) -> dict[str, Any]:
        return {
            "picture": words.picture(made.outlooks),
            "head": words.head(made.given),
            "rows": [words.row(one, made.given) for one in made.outlooks],
            "code_title": words.code_title(last, made.given),
            "code_head": words.CODE_HEAD,
            "code_rows": [words.code_row(code) for code in last.codes],
            "nodes": last.nodes,
            "advice": words.advice(last, made.given),
            "assumptions": _assumptions(made),
            "notes": made.notes,
        }

    return fitted_page("estimate.html", values, source="ftrun estimate", made_t_s=clock.wall_s())


def _assumptions(made: Estimate) -> list[dict[str, Any]]:
    return [
        {
            "flag": flag_of(name),
            "value": getattr(made.given, name),
            "unit": about.unit,
            "meaning": about.meaning,
            "origin": made.origins[name],
        }
        for name, about in ((one.name, ABOUT[one.name]) for one in fields(made.given))
    ]


def _document(made: Estimate) -> dict[str, Any]:
    last = made.outlooks[-1]
    return {
        "assumptions": _assumptions(made),
        "nodes": [_plain(asdict(one) | {"code": one.code.name}) for one in made.outlooks],
        "advice": {"nodes": last.nodes, **dict(words.advice(last, made.given))},
        "notes": made.notes,
    }


def _plain(value: Any) -> Any:
    """Replaces infinity by None, because JSON has no infinity."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- flags ------------------------------------------------------------------------------------


class EstimateCommand(TyperCommand):
    """Command with its own help text: groups of flags with their sources."""

    def get_help(self, ctx: Any) -> str:
        return estimate_help()


def estimate_help() -> str:
    width = help_width()
    own = {f"{flag_of(name)} {metavar}".rstrip(): text for name, (_, metavar, text) in _OWN.items()}
    parts = [_INTRO, "Options:", *help_rows(own, width)]
    groups: dict[str, dict[str, str]] = {}
    for name, about in ABOUT.items():
        value = default_text(name)
        default = f"Default {value} ({about.source})" if value else f"Default: {about.source}"
        flag = f"{flag_of(name)} {about.unit.upper()}"
        groups.setdefault(about.group, {})[flag] = f"{about.meaning}. {default}"
    for group, rows in groups.items():
        parts += ["", f"{group}:", *help_rows(rows, width)]
    return "\n".join(parts)


def default_text(name: str) -> str:
    value = next(field.default for field in fields(Assumptions) if field.name == name)
    return "" if value is None else f"{value:,.10g}"


def estimate_command(**typed: Any) -> None:
    """Estimate what failures will cost, and which code, interval and spares to choose."""
    is_json = typed["json"]
    files = requested_files(typed["svg"], typed["html"], as_json=is_json)
    values = {name: typed[name] for name in ABOUT if typed[name] is not None}
    choices = {name: typed[name] for name in ("run", "code", "snapshot_every", "spares")}
    made = estimated(typed["nodes"] or DEFAULT_NODES, values, **choices)
    write_outputs(
        files,
        {
            "--svg": lambda: f"{words.picture(made.outlooks, picture_style())}\n",
            "--html": lambda: _html(made),
        },
        document=(lambda: _document(made)) if is_json else None,
        show=lambda: _show(made),
    )


def _parameters() -> Iterator[inspect.Parameter]:
    for name, (kind, metavar, text) in _OWN.items():
        declared = option(flag_of(name), text, metavar or None)
        yield parameter(name, kind if kind is bool else kind | None, declared)
    for field in fields(Assumptions):
        about, kind = ABOUT[field.name], int if field.type is int else float
        declared = option(flag_of(field.name), about.meaning, about.unit.upper())
        yield parameter(field.name, kind | None, declared)


app = typer.Typer(rich_markup_mode=None, add_completion=False)
app.command(cls=EstimateCommand)(with_parameters(estimate_command, list(_parameters())))
