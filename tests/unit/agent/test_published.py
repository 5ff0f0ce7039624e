"""A published value is fresh or states its age; no reader accesses the data it is built from."""

import threading
from collections.abc import Iterator

import pytest

from ftrun import clock
from ftrun.agent.publish import published
from ftrun.agent.publish.published import Published
from ftrun.errors import PeerError

DEADLINE_S = 60.0


class Owner:
    """A thread with a loop, which publishes the number of times it has built the value."""

    def __init__(self) -> None:
        self.built_in: list[str] = []
        self.fails = False
        self.is_busy = threading.Event()
        self.may_continue = threading.Event()
        self.may_continue.set()
        self._woken = threading.Event()
        self._is_over = False
        self.value: Published[int] = Published(self._build, wake=self._woken.set)
        self.thread = threading.Thread(target=self._run, name="owner", daemon=True)

    def _build(self) -> int:
        if self.fails:
            raise AttributeError("'NoneType' object has no attribute 'text'")
        self.built_in.append(threading.current_thread().name)
        return len(self.built_in)

    def _run(self) -> None:
        while not self._is_over:
            self._woken.wait(DEADLINE_S)
            self._woken.clear()
            if not self.may_continue.is_set():
                self.is_busy.set()
                self.may_continue.wait(DEADLINE_S)
            self.value.poll(clock.now_s())

    def end(self) -> None:
        self._is_over = True
        self.may_continue.set()
        self._woken.set()
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()

    def becomes_busy(self) -> None:
        self.may_continue.clear()
        self._woken.set()
        assert self.is_busy.wait(DEADLINE_S)


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Owner]:
    monkeypatch.setattr(published, "WAIT_S", DEADLINE_S)
    made = Owner()
    made.thread.start()
    yield made
    made.end()


def test_each_reading_is_built_again_and_by_the_owner(owner: Owner) -> None:
    first, second = owner.value.read(), owner.value.read()
    assert second.value > first.value
    assert set(owner.built_in) == {"owner"}


def test_while_the_owner_is_busy_the_last_value_is_read_with_its_age(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = owner.value.read()
    owner.becomes_busy()
    monkeypatch.setattr(published, "WAIT_S", 0.05)
    started_s = clock.now_s()
    found = owner.value.read()
    assert found.value == before.value
    assert found.age_s >= 0.05
    assert clock.now_s() - started_s < DEADLINE_S / 2
    monkeypatch.setattr(published, "WAIT_S", DEADLINE_S)
    owner.may_continue.set()
    assert owner.value.read().value > before.value


def test_a_value_that_cannot_be_built_ends_neither_the_owner_nor_the_reader(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    owner.fails = True
    with pytest.raises(PeerError, match="no status yet: AttributeError: 'NoneType'"):
        owner.value.read()
    with pytest.raises(PeerError):
        owner.value.read()
    owner.fails = False
    last = owner.value.read()
    owner.fails = True
    assert owner.value.read().value == last.value
    reported = [one for one in caplog.records if "cannot be built" in one.message]
    assert len(reported) == 2, "once per problem"


def test_a_value_that_was_never_built_is_no_value() -> None:
    with pytest.raises(PeerError, match="the agent has just been started"):
        Published(lambda: 1, wake=lambda: None).last()


def test_without_a_request_a_value_is_built_now_and_then() -> None:
    built: list[float] = []
    made = Published(lambda: built.append(0.0) or len(built), wake=lambda: None)
    made.poll(clock.now_s())
    made.poll(clock.now_s())
    assert made.last().value == 1
    made.poll(clock.now_s() + published.EVERY_S)
    assert made.last().value == 2
