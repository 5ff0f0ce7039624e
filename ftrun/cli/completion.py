"""Builds parameters for typer: flags of a run, groups of options, and what the shell completes."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ftrun.cli.launch.command_line import OWN_FLAGS
from ftrun.cli.launch.torchrun_flags import TORCHRUN_FLAGS, CliFlag


class AsTyped(TyperCommand):
    """Command that passes every word to its function unparsed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        ctx.args = list(args)
        return ctx.args  # type: ignore[no-any-return]


def with_parameters(function: Any, parameters: Sequence[inspect.Parameter]) -> Any:
    """Gives a function the parameters that typer reads, in place of those that it has."""
    function.__signature__ = inspect.Signature(parameters)
    function.__annotations__ = {one.name: one.annotation for one in parameters}
    return function


def option(
    flag: str, text: str, metavar: str | None = None, *, short: str = "", **more: Any
) -> Any:
    return typer.Option(*filter(None, (short, flag)), help=text, metavar=metavar, **more)


def parameter(name: str, kind: Any, declared: Any) -> inspect.Parameter:
    default = False if kind is bool else None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared]
    )


def with_flags(function: Any) -> Any:
    """Adds the parameters to a function that typer needs to complete the flags of a run."""
    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    flags = [
        parameter(
            flag.dest,
            str if flag.takes_value else bool,
            typer.Option(*flag.spellings, help=flag.help, autocompletion=_completion(flag)),
        )
        for flag in (*OWN_FLAGS, *TORCHRUN_FLAGS)
    ]
    return with_parameters(function, [context, *flags])


def with_groups(function: Callable[..., None]) -> Any:
    """Replaces each parameter that is a dataclass by its fields, as options of the command."""
    given = inspect.signature(function).parameters.values()
    groups: dict[str, Any] = {
        one.name: one.annotation for one in given if is_dataclass(one.annotation)
    }

    def command(**typed: Any) -> None:
        made = {
            name: kind(**{one.name: typed.pop(one.name) for one in fields(kind)})
            for name, kind in groups.items()
        }
        function(**typed, **made)

    command.__doc__ = function.__doc__
    parameters: list[inspect.Parameter] = []
    for one in given:
        is_group = one.name in groups
        parameters += inspect.signature(one.annotation).parameters.values() if is_group else [one]
    named = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    return with_parameters(command, named)


def _completion(flag: CliFlag) -> Any:
    if flag.name == "profile":
        return profile_names
    return (lambda: list(flag.choices)) if flag.choices else None


def profile_names() -> list[str]:
    from ftrun.cli.launch import profiles as profile_files

    return profile_files.profile_names()


def _run_ids() -> list[str]:
    from ftrun.wire.run_environment import all_run_folders

    return [folder.run_id for folder in all_run_folders()]


AsJson = Annotated[bool, option("--json", "as one JSON document")]

RunIdArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN_ID", help="required if several runs are alive", autocompletion=_run_ids
    ),
]
