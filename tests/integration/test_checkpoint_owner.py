"""One run at a time writes to a directory of checkpoints, and removes none of other runs.

Real SMP processes; the test plays their agents. See test_checkpoint_nodes.
"""

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftrun.errors import CheckpointError, CheckpointsTaken
from ftrun.ids import RunId, version
from ftrun.smp import checkpoint_owner
from ftrun.smp.checkpoint_owner import CheckpointOwnership
from ftrun.wire import checkpoint_messages, messages, smp_messages
from ftrun.wire.checkpoint_owner import OWNER_NAME, CheckpointClaim, CheckpointOwner, decode_owner
from ftrun.wire.pages import create_command_page
from tests.integration import test_checkpoint_nodes as nodes_of
from tests.integration.test_checkpoint_nodes import WORLD, Make, Node, finished, wait_until

make = nodes_of.make

_LIVES = (f"{number:x}" for number in itertools.count(1))
FAST_S = 0.05


def claim(directory: Path, node: Node, *, inherits: bool = True) -> str:
    """Load with a claim, as `Generations.adopt` does; the refusal, if another run is alive."""
    claimed = CheckpointClaim(str(directory), next(_LIVES), 1, inherits)
    body = checkpoint_messages.LoadCheckpoint(str(directory), WORLD, node.ranks, claim=claimed)
    answer = node.ask(body)
    assert isinstance(answer, checkpoint_messages.CheckpointLoaded), answer
    if not answer.is_taken:
        node.page_fd = create_command_page() if node.page_fd < 0 else node.page_fd
        begun = smp_messages.BeginGeneration(0, WORLD, node.ranks, claim=claimed)
        assert node.ask(begun, node.page_fd) == messages.Done()
        if not node.arenas:
            node.make_arenas()
    assert answer.is_taken == (answer.problem != "")
    return answer.problem


def save(node: Node, directory: Path, *steps: int) -> None:
    for step in steps:
        node.seal(version(0, step), slot=step % 2)
        finished(node.write(directory, version(0, step), keep=2))


def steps_of(directory: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in directory.glob("step-*"))


def record(directory: Path) -> CheckpointOwner:
    path = directory / OWNER_NAME
    # A store of files writes in place: a reader may find half of a record.
    wait_until(lambda: decode_owner(path.read_bytes()) is not None, "a whole record")
    found = decode_owner(path.read_bytes())
    return record(directory) if found is None else found


def test_a_second_run_is_refused_until_the_first_has_ended_or_was_killed(
    make: Make, tmp_path: Path
) -> None:
    ranks = list(range(WORLD))
    first, second, third, last = (make(*ranks, run_id=f"run-{name}") for name in "abcd")
    for node in (first, second, third, last):
        node.start()
    saved = tmp_path / "saved"
    assert not claim(saved, first)
    save(first, saved, 1, 2, 3)
    refusal = claim(saved, second)
    assert f"{saved} belongs to run run-a since" in refusal
    assert "ftrun stop run-a" in refusal

    first.kill()
    assert not claim(saved, second), "the owner was killed on this machine"
    save(second, saved, 4)
    assert steps_of(saved) == [3, 4], "it continues the first run, and keeps two"
    assert second.ask(checkpoint_messages.EndCheckpoints(0, "done", "x")) == messages.Done()
    assert (record(saved).run_id, record(saved).exit_code) == ("run-b", 0)

    assert not claim(saved, third, inherits=False), "the owner has ended"
    save(third, saved, 5, 6, 7)
    assert steps_of(saved) == [3, 4, 6, 7], "--resume never: what others have left stays"
    written = nodes_of.refused(second.write(saved, version(0, 4)))
    assert "belongs to run run-c" in written


# --- what needs more than one machine: the parts, with short intervals ---------------------------


@pytest.fixture(params=["directory", "url"])
def where(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(checkpoint_owner._Folder, "renew_s", FAST_S)
    monkeypatch.setattr(checkpoint_owner._Url, "renew_s", 4 * FAST_S)
    monkeypatch.setattr(checkpoint_owner, "_SETTLE_S", FAST_S)
    (tmp_path / "saved").mkdir()
    prefix = "file://" if request.param == "url" else ""
    return f"{prefix}{tmp_path / 'saved'}"


Own = Callable[[str], CheckpointOwnership]


@pytest.fixture
def run() -> Iterator[Own]:
    stop = threading.Event()
    threads = set(threading.enumerate())
    yield lambda run_id: CheckpointOwnership(RunId(run_id), stop, lambda: run_id not in asleep)
    stop.set()
    for thread in set(threading.enumerate()) - threads:
        thread.join(20)
    asleep.clear()


asleep: set[str] = set()


def elsewhere(path: Path) -> None:
    """As if the record had been written on another machine."""
    found = json.loads((path / OWNER_NAME).read_bytes())
    (path / OWNER_NAME).write_text(json.dumps({**found, "machine": "another", "pid": 1}))


def test_an_owner_elsewhere_is_alive_while_its_record_changes(
    run: Own, where: str, tmp_path: Path
) -> None:
    first, second = run("first"), run("second")
    first.claim(CheckpointClaim(where, "1", 2, True))
    with pytest.raises(CheckpointsTaken, match="belongs to run first"):
        second.claim(CheckpointClaim(where, "2", 2, True))
    asleep.add("first")
    elsewhere(tmp_path / "saved")
    second.claim(CheckpointClaim(where, "2", 2, True))
    assert second.check(where) == {"first", "second"}
    asleep.clear()
    with pytest.raises(CheckpointError, match="belongs to run second"):
        first.check(where)
    first.end(0, "done", "")
    wait_until(lambda: record(tmp_path / "saved").beat > 0, "the second run renews its record")
    assert record(tmp_path / "saved").run_id == "second"


def test_a_run_that_is_started_again_takes_its_directory_over_at_once(
    run: Own, where: str, tmp_path: Path
) -> None:
    before, again = run("one"), run("one")
    before.claim(CheckpointClaim(where, "1", 2, True))
    again.claim(CheckpointClaim(where, "2", 2, True))
    assert record(tmp_path / "saved").life == "2"
    wait_until(lambda: before._taken, "the life before writes no checkpoint any more")


def test_of_two_runs_that_claim_at_once_one_is_refused(
    run: Own, where: str, tmp_path: Path
) -> None:
    refused: list[str] = []

    def begin(run_id: str) -> None:
        try:
            run(run_id).claim(CheckpointClaim(where, run_id, 1, True))
        except CheckpointsTaken:
            refused.append(run_id)

    threads = [threading.Thread(target=begin, args=(run_id,)) for run_id in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted([*refused, record(tmp_path / "saved").run_id]) == ["a", "b", "c"]
