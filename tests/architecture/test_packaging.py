"""The wheel contains the whole package; versions and pins agree."""

import tomllib
from pathlib import Path

import ftrun

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_in_the_wheel() -> None:
    found = {
        ".".join(path.parent.relative_to(ROOT).parts) for path in ROOT.glob("ftrun/**/__init__.py")
    }
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    assert listed == found | {"ftrun._data.profiles", "ftrun._data.scripts"}


def test_version_is_one() -> None:
    assert PROJECT["project"]["version"] == ftrun.__version__
    assert f"## [{ftrun.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_what_is_needed_is_pinned_for_the_checks() -> None:
    lines = (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    groups = PROJECT["dependency-groups"]
    wanted = [*PROJECT["project"]["dependencies"], *groups["dev"], *groups["frameworks"]]
    names = {name.partition(">=")[0].partition(";")[0].strip().lower() for name in wanted}
    assert names - pinned == set()
    assert "torch" not in pinned
