"""A run is found by its id, and a node of it on this machine by run id and node name."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftrun.cli.run import take_folder
from ftrun.cli.runs import choose
from ftrun.errors import FtrunError, UsageError


@pytest.fixture(autouse=True)
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two nodes of one run, and a run on one node."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    names = ("big@a", "big@b", "small")
    locks = [take_folder(name, script="t.py")[1] for name in names]
    yield
    for lock_fd in locks:
        os.close(lock_fd)


def test_a_node_is_chosen_by_both_names() -> None:
    found = choose("big@b", command="status")
    assert (found.name, found.run_id) == ("big@b", "big")
    assert choose("small", command="status").name == "small"


@pytest.mark.parametrize("name", ["big", None])
def test_several_are_listed_by_the_names_a_command_takes(name: str | None) -> None:
    with pytest.raises(UsageError) as caught:
        choose(name, command="stop")
    assert "ftrun stop big@a" in str(caught.value)
    assert "ftrun stop big@b" in str(caught.value)
    assert ("ftrun stop small" in str(caught.value)) == (name is None)


def test_the_only_node_here_answers_to_its_run_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    _, lock_fd = take_folder("big@a", script="t.py")
    assert choose("big", command="status").name == "big@a"
    assert choose(None, command="status").name == "big@a"
    os.close(lock_fd)


@pytest.mark.parametrize("name", ["none", "big@c", "small@a"])
def test_what_is_not_there_is_reported_with_what_is(name: str) -> None:
    with pytest.raises(FtrunError) as caught:
        choose(name, command="status")
    assert "big@a, big@b, small" in str(caught.value)


@pytest.mark.parametrize("name", ["../x", "big@../x", "@a", "big@"])
def test_a_name_that_could_be_a_path_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        choose(name, command="status")
