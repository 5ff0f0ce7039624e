"""Declares what the shell completes: flags of a run, names of profiles and runs."""

import inspect
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


def with_flags(function: Any) -> Any:
    """Adds the parameters to a function that typer needs to complete the flags of a run."""
    parameters = [
        inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    ]
    for flag in (*OWN_FLAGS, *TORCHRUN_FLAGS):
        option = typer.Option(*flag.spellings, help=flag.help, autocompletion=_completion(flag))
        kind: Any = str if flag.takes_value else bool
        parameters.append(
            inspect.Parameter(
                flag.dest,
                inspect.Parameter.KEYWORD_ONLY,
                default=None if flag.takes_value else False,
                annotation=Annotated[kind, option],
            )
        )
    function.__signature__ = inspect.Signature(parameters)
    function.__annotations__ = {p.name: p.annotation for p in parameters}
    return function


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


RunIdArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN_ID", help="required if several runs are alive", autocompletion=_run_ids
    ),
]
