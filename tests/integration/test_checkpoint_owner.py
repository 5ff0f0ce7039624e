"""One run at a time writes to a directory of checkpoints, and removes none of other runs.

Real SMP processes; the test acts as their agents. See test_checkpoint_nodes.
"""

import contextlib
import fcntl
import itertools
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftrun.errors import CheckpointError, CheckpointsTaken
from ftrun.ids import RunId, version
from ftrun.smp.checkpoint.storage import owner as checkpoint_owner
from ftrun.smp.checkpoint.storage.local import LOCK_NAME
from ftrun.smp.checkpoint.storage.owner import CheckpointOwnership
from ftrun.wire.checkpoint_owner import OWNER_NAME, CheckpointClaim, CheckpointOwner, decode_owner
from ftrun.wire.messages import checkpoint as checkpoint_messages
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.shared_memory.pages import create_command_page
from tests.integration import test_checkpoint_nodes as nodes_of
from tests.integration.conftest import in_full
from tests.integration.test_checkpoint_nodes import WORLD, Make, Node, finished, wait_until

make = nodes_of.make

_LIVES = (f"{number:x}" for number in itertools.count(1))
FAST_S = 0.2
LIFE: dict[str, str] = {}
"""The last claim, by the name of a node."""


def claim(directory: Path, node: Node, *, inherits: bool = True, num_nodes: int = 1) -> str:
    """Load with a claim of a new run; the refusal, if another run is alive."""
    LIFE[node.name] = next(_LIVES)
    answer = load_with_claim(directory, node, inherits=inherits, num_nodes=num_nodes)
    assert answer.is_taken == (answer.problem != "")
    return answer.problem


def load_with_claim(
    directory: Path, node: Node, *, inherits: bool = True, num_nodes: int = 1
) -> checkpoint_messages.CheckpointLoaded:
    """As `GenerationRunner.adopt` does it."""
    claimed = CheckpointClaim(str(directory), LIFE[node.name], num_nodes, inherits)
    body = checkpoint_messages.LoadCheckpoint(str(directory), WORLD, node.ranks, claim=claimed)
    answer = node.ask(body)
    assert isinstance(answer, checkpoint_messages.CheckpointLoaded), answer
    if not answer.is_taken:
        node.page_fd = create_command_page() if node.page_fd < 0 else node.page_fd
        started = smp_messages.BeginGeneration(0, WORLD, node.ranks, claim=claimed)
        assert node.ask(started, node.page_fd) == messages.Done()
        if not node.arenas:
            node.make_arenas()
    return answer


def write(node: Node, directory: Path, step: int) -> messages.AnyMessage:
    node.seal(version(0, step), slot=step % 2)
    where, life = str(directory), LIFE[node.name]
    return node.ask(checkpoint_messages.WriteCheckpoint(where, 2, (0, step), life=life))


def save(node: Node, directory: Path, *steps: int) -> None:
    for step in steps:
        finished(write(node, directory, step))


def steps_of(directory: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in directory.glob("step-*"))


def record(directory: Path) -> CheckpointOwner:
    path = directory / OWNER_NAME
    # A store of files writes in place: a reader may find half of a record.
    wait_until(lambda: path.exists() and decode_owner(path.read_bytes()) is not None, "a record")
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
    assert "belongs to run run-c" in nodes_of.refused(write(second, saved, 8))


def test_two_live_runs_of_one_id_are_two_runs(make: Make, tmp_path: Path) -> None:
    """Without --run-id, two jobs of one script on one port have one id. See `cli.run`."""
    first, second, again, newer = (make(*range(WORLD)) for _ in range(4))
    for node in (first, second, again, newer):
        node.start()
    saved = tmp_path / "saved"
    assert not claim(saved, first, num_nodes=2)
    save(first, saved, 1, 2)
    assert f"{saved} belongs to run {first.run_id} since" in claim(saved, second, num_nodes=2)
    assert f"belongs to run {first.run_id}" in nodes_of.refused(write_as(second, saved, 3))
    save(first, saved, 3)
    assert steps_of(saved) == [2, 3], "the second has removed nothing"

    first.kill()
    started_s = time.monotonic()
    LIFE[again.name] = LIFE[first.name]
    assert not load_with_claim(saved, again, num_nodes=2).problem, "another SMP of the same life"
    save(again, saved, 4)
    again.kill()
    assert not claim(saved, newer, num_nodes=2), "started again, on the machine of the dead owner"
    save(newer, saved, 5)
    assert steps_of(saved) == [4, 5], "it continues the first run, and keeps two"
    assert time.monotonic() - started_s < checkpoint_owner.RENEW_S, "neither has waited"


def write_as(node: Node, directory: Path, step: int) -> messages.AnyMessage:
    """Write a part as another node of the same run, which has made no claim."""
    if not node.arenas:
        node.begin()
        node.make_arenas()
    return write(node, directory, step)


@pytest.mark.parametrize("kind", ["full disk", *in_full("no file", "lock")])
def test_a_record_that_cannot_be_written_keeps_no_good_checkpoint_from_its_run(
    make: Make, tmp_path: Path, kind: str
) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    with contextlib.ExitStack() as ends:
        if kind == "full disk":
            if os.geteuid() != 0:
                pytest.skip("needs root, to mount a small file system")
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", saved], check=True)
            ends.callback(subprocess.run, ["umount", "--lazy", str(saved)], check=True)
        first, second = (make(*range(WORLD), run_id=f"run-{name}") for name in "ab")
        first.start()
        second.start()
        assert not claim(saved, first)
        save(first, saved, 1)
        first.kill()
        with hindered(saved, kind):
            LIFE[second.name] = next(_LIVES)
            answer = load_with_claim(saved, second)
            assert (answer.problem, answer.step) == ("", 1)
            assert kind == "no file" or record(saved).run_id == "run-a"
        wait_until(lambda: record(saved).run_id == "run-b", "trying again")
        save(second, saved, 2)


@contextlib.contextmanager
def hindered(saved: Path, kind: str) -> Iterator[None]:
    path, filler = saved / OWNER_NAME, saved / "filler"
    if kind == "no file":
        path.unlink()
        path.mkdir()
        yield
        path.rmdir()
    elif kind == "full disk":
        with filler.open("wb", 0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 12)):
                pass
        yield
        filler.unlink()
    else:
        with (saved / LOCK_NAME).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


# --- tests that need more than one machine: the parts, with short intervals --------------------


@pytest.fixture(params=["directory", "url"])
def where(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(checkpoint_owner._Folder, "renew_s", FAST_S)
    monkeypatch.setattr(checkpoint_owner._Url, "renew_s", 2 * FAST_S)
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
    give_up_s = time.monotonic() + 20
    while set(threading.enumerate()) - threads and time.monotonic() < give_up_s:
        time.sleep(0.01)  # a thread that is being started cannot be joined
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
    assert second.check(where, "2") == {"first", "second"}
    asleep.clear()
    with pytest.raises(CheckpointError, match="belongs to run second"):
        first.check(where, "1")
    first.end(0, "done", "")
    wait_until(lambda: record(tmp_path / "saved").heartbeat > 0, "the second run renews its record")
    assert record(tmp_path / "saved").run_id == "second"


def test_a_run_that_is_started_again_elsewhere_waits_until_it_is_known_to_be_alone(
    run: Own, where: str, tmp_path: Path
) -> None:
    """One id, another life: a job that is queued again, or another job of the same script."""
    before, again, last = run("one"), run("one"), run("one")
    before.claim(CheckpointClaim(where, "1", 2, True))
    with pytest.raises(CheckpointsTaken, match="belongs to run one"):
        again.claim(CheckpointClaim(where, "2", 2, True))
    with pytest.raises(CheckpointError, match="belongs to run one"):
        again.check(where, "2")
    assert before.check(where, "1") == {"one"}
    asleep.add("one")  # all of its nodes were killed
    elsewhere(tmp_path / "saved")
    again.claim(CheckpointClaim(where, "2", 2, True))
    assert record(tmp_path / "saved").life == "2"
    with pytest.raises(CheckpointError, match="belongs to run one"):
        before.check(where, "1")
    asleep.clear()
    wait_until(lambda: before._taken, "the life before writes no checkpoint any more")
    again.end(143, "it was asked to stop", "")
    started_s = time.monotonic()
    last.claim(CheckpointClaim(where, "3", 2, True))
    assert time.monotonic() - started_s < checkpoint_owner.RENEW_S, "an end needs no wait"


def test_another_node_of_the_same_life_takes_the_directory_over_at_once(
    run: Own, where: str, tmp_path: Path
) -> None:
    before, now = run("one"), run("one")
    before.claim(CheckpointClaim(where, "1", 3, True))
    elsewhere(tmp_path / "saved")
    before.renew(None)
    started_s = time.monotonic()
    now.claim(CheckpointClaim(where, "1", 2, True))
    assert time.monotonic() - started_s < checkpoint_owner.RENEW_S
    assert now.check(where, "1") == before.check(where, "1") == {"one"}
    now.claim(CheckpointClaim(where, "2", 2, True))  # the agent was killed while it loaded
    assert time.monotonic() - started_s < checkpoint_owner.RENEW_S
    assert record(tmp_path / "saved").life == "2"


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
