"""Implements `ftrun profiles`: lists the profiles, and shows the values of one.

Runs in: cli.
"""

import os

from ftrun.cli.launch.profiles import (
    ResolvedProfile,
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


def list_profiles() -> None:
    rows = []
    for name in profile_names():
        first = (profile_folder() / f"{name}.yaml").read_text().partition("\n")[0]
        rows.append((name, first.lstrip("# ").rstrip()))
    render.show_pairs(rows)
    render.write_plain(
        "\nUse one: ftrun --profile NAME train.py. Its values: ftrun profiles show NAME --origin"
    )


def show_profile(name: str, *, with_origin: bool) -> None:
    path = find_profile(name)
    resolved = resolve(name, variables=os.environ)
    # The full path of a packaged profile, so that an operator finds the file.
    render.write_plain(f"# {path if path.parent == profile_folder() else shown_path(path)}")
    render.show_profile(_rows(resolved, with_origin=with_origin))


def _rows(resolved: ResolvedProfile, *, with_origin: bool) -> list[tuple[str, str, str, str]]:
    rows = []
    for section, key in known_keys():
        part = getattr(resolved.profile, section)
        about = description_of(key_type(section, key))
        origin = resolved.origins.get(f"{section}.{key}", "default")
        value = render.value_text(getattr(part, key))
        rows.append((f"{section}.{key}", value, origin if with_origin else "", about))
    return rows
