"""`ftrun profiles`: lists the profiles, and shows the values of one."""

import os
from typing import Annotated

import typer

from ftrun.cli.completion import option
from ftrun.cli.launch.profiles import (
    find_profile,
    key_type,
    known_keys,
    profile_folder,
    profile_names,
    resolve,
    shown_path,
)
from ftrun.cli.screen import terminal as render
from ftrun.config.checks import description_of

app = typer.Typer(
    help="List profiles, and show where each value comes from.",
    rich_markup_mode=None,
    add_completion=False,
)


@app.callback(invoke_without_command=True)
def _profiles(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is not None:
        return
    rows = []
    for name in profile_names():
        first = (profile_folder() / f"{name}.yaml").read_text().partition("\n")[0]
        rows.append((name, first.lstrip("# ").rstrip()))
    render.show_pairs(rows)
    render.write_plain(
        "\nUse one: ftrun --profile NAME train.py. Its values: ftrun profiles show NAME --origin"
    )


@app.command("show")
def _show(
    name: Annotated[str, typer.Argument(help="name or file", autocompletion=profile_names)],
    origin: Annotated[bool, option("--origin", "show the origin of each value")] = False,
) -> None:
    """Show every value of a profile."""
    path = find_profile(name)
    resolved = resolve(name, variables=os.environ)
    # The full path of a packaged profile, so that an operator finds the file.
    render.write_plain(f"# {path if path.parent == profile_folder() else shown_path(path)}")
    rows = []
    for section, key in known_keys():
        value = render.value_text(getattr(getattr(resolved.profile, section), key))
        source = resolved.origins.get(f"{section}.{key}", "default") if origin else ""
        rows.append((f"{section}.{key}", value, source, description_of(key_type(section, key))))
    render.show_profile(rows)
