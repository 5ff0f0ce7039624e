"""Declares the flags of `ftrun estimate` from the table of assumptions.

Runs in: cli. The implementation is imported when the command runs.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ftrun.tools.estimate.assumptions import ABOUT, Assumptions, flag_of

DEFAULT_NODES = "16..16384"

_OWN: Mapping[str, tuple[Any, str, str]] = {
    "nodes": (str, "N|MIN..MAX|N,N",
              f"how many nodes train; a range is doubled from MIN to MAX. Default {DEFAULT_NODES}"),
    "run": (str, "RUN", "take ftrun's costs from this run's journal: run id, or folder of its "
            "logs; `last` is the one written to last"),
    "code": (str, "K+M", "judge this code instead of choosing one"),
    "snapshot_every": (int, "STEPS", "judge this interval instead of choosing one"),
    "spares": (int, "N", "judge so many spares instead of choosing"),
    "svg": (str, "FILE", "the picture, as a file of its own; - for stdout"),
    "html": (str, "FILE", "all of it as one page; - for stdout"),
    "json": (bool, "", "all of it as one JSON document, with every assumption and its source"),
}  # fmt: skip

_INTRO = """\
Usage: ftrun estimate [OPTIONS]

Say on paper what failures will cost a run of so many nodes, and what k + m, interval and spares
would be chosen. Nothing is started. Compared are checkpoints at their best interval with a restart
of the whole job, the same with failures noticed by ftrun, and snapshots in memory under ftrun.

Examples:
  ftrun estimate                                     16 to 16,384 nodes, all assumptions as below
  ftrun estimate --nodes 2048 --days 54 --state-gb 3 --step 15
  ftrun estimate --run last --nodes 64..1024         with what ftrun has cost in a run of yours
  ftrun estimate --svg goodput.svg

Every assumption is an option, with its default and where that is from. A guess says so: it is
where your own figure is worth most. docs/estimate.md has the formulas.
"""


class EstimateCommand(TyperCommand):
    """Command with its own help text: groups of flags with their sources."""

    def get_help(self, ctx: Any) -> str:
        return estimate_help()


def estimate_help() -> str:
    from ftrun.cli.help_text import help_width, rows

    width = help_width()
    own = {f"{_flag(name)} {metavar}".rstrip(): words for name, (_, metavar, words) in _OWN.items()}
    parts = [_INTRO, "What is asked, and what is given:", *rows(own, width)]
    for group, told in _groups().items():
        parts += ["", f"{group}:", *rows(told, width)]
    return "\n".join(parts)


def default_words(name: str) -> str:
    value = next(field.default for field in fields(Assumptions) if field.name == name)
    return "" if value is None else f"{value:,.10g}"


def _groups() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for name, about in ABOUT.items():
        value = default_words(name)
        default = f"Default {value} ({about.source})" if value else f"Default: {about.source}"
        words = f"{about.meaning}. {default}"
        found.setdefault(about.group, {})[f"{flag_of(name)} {about.unit.upper()}"] = words
    return found


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def estimate_command(**words: Any) -> None:
    """Estimate what failures will cost, and which code, interval and spares to choose."""
    from ftrun.tools.estimate.command import EstimateRequest, estimate

    values = {name: words[name] for name in ABOUT if words[name] is not None}
    own = {name: words[name] for name in _OWN}
    own["nodes"] = own["nodes"] or DEFAULT_NODES
    wanted = EstimateRequest(values=values, as_json=own.pop("json"), **own)
    raise typer.Exit(estimate(wanted))


def _parameters() -> Iterator[inspect.Parameter]:
    for name, (kind, metavar, words) in _OWN.items():
        option = typer.Option(_flag(name), metavar=metavar or None, help=words)
        default = False if kind is bool else None
        yield _parameter(name, default, kind if kind is bool else kind | None, option)
    for field in fields(Assumptions):
        about = ABOUT[field.name]
        option = typer.Option(flag_of(field.name), metavar=about.unit.upper(), help=about.meaning)
        kind = int if field.type is int else float
        yield _parameter(field.name, None, kind | None, option)


def _parameter(name: str, default: Any, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


# typer derives flags from a function's parameters; these come from the table.
estimate_command.__signature__ = inspect.Signature(list(_parameters()))  # type: ignore[attr-defined]
estimate_command.__annotations__ = {
    name: parameter.annotation for name, parameter in
    estimate_command.__signature__.parameters.items()  # type: ignore[attr-defined]
}  # fmt: skip

app = typer.Typer(rich_markup_mode=None, add_completion=False)
app.command(cls=EstimateCommand)(estimate_command)
