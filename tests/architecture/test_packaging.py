"""The wheel contains the whole package; versions, pins and the conda recipe agree."""

import io
import tarfile
import tomllib
from pathlib import Path

import build_backend
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

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


NAMES_IN_CONDA = {"prometheus-client": "prometheus_client", "xxhash": "python-xxhash"}


def test_the_conda_recipe_agrees_with_the_project() -> None:
    project = PROJECT["project"]
    text = (ROOT / "scripts" / "conda" / "meta.yaml").read_text()
    recipe = yaml.safe_load(text)
    assert recipe["package"] == {"name": "ftrun", "version": project["version"]}
    (script,) = recipe["build"]["entry_points"]
    assert script == f"ftrun = {project['scripts']['ftrun']}"
    wanted = [Requirement(one) for one in project["dependencies"]]
    names = {NAMES_IN_CONDA.get(one.name, one.name): one.specifier for one in wanted}
    assert f'"pyeclib{names.pop("pyeclib")}"'.replace("<2,>=1.8", ">=1.8,<2") in text
    _, _, *run = recipe["requirements"]["run"]
    found = {name: SpecifierSet(limits) for name, _, limits in (one.partition(" ") for one in run)}
    assert found == names
    for part in ("host", "run"):
        assert f"python {project['requires-python']}" in recipe["requirements"][part]
    (build,) = PROJECT["build-system"]["requires"]
    assert build.replace(">", " >", 1) in recipe["requirements"]["host"]
    (torch,) = recipe["requirements"]["run_constrained"]
    assert torch.replace("pytorch ", "torch") in project["optional-dependencies"]["torch"]
    assert recipe["about"]["summary"] == project["description"]
    assert recipe["about"]["license"] == project["license"]


def archive(*, modified_s: int, mode: int, owner: str, is_reversed: bool) -> bytes:
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w:gz") as target:
        for name in sorted(("f/a", "f/b"), reverse=is_reversed):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.mode, entry.uname = 4, modified_s, mode, owner
            target.addfile(entry, io.BytesIO(f"in {name[-1]}".encode()))
    return found.getvalue()


def test_a_source_archive_has_the_same_bytes_on_each_machine() -> None:
    first = archive(modified_s=1, mode=0o640, owner="me", is_reversed=False)
    second = archive(modified_s=9, mode=0o664, owner="you", is_reversed=True)
    plain = build_backend.normalised(first, 1_700_000_000)
    assert plain == build_backend.normalised(second, 1_700_000_000)
    assert plain != build_backend.normalised(first, 1_700_000_001)
    with tarfile.open(fileobj=io.BytesIO(plain)) as read:
        assert read.getnames() == ["f/a", "f/b"]
        entry = read.getmember("f/b")
        assert (entry.mode, entry.mtime, entry.uname) == (0o644, 1_700_000_000, "")
        content = read.extractfile(entry)
        assert content is not None
        assert content.read() == b"in b"
