"""When memory that was refused is asked for again."""

import pytest

from ftrun.errors import MemoryTooSmall
from ftrun.worker import slots


def is_over(*, needed_bytes: int, available_bytes: int) -> bool:
    error = MemoryTooSmall(
        needed_bytes=needed_bytes, available_bytes=available_bytes, limit="a limit"
    )
    return slots._Refusal(error, ((), ()), 8).is_over()


def test_memory_that_has_become_free_is_asked_for_before_the_pause_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slots, "_RETRY_S", 600.0)
    assert not is_over(needed_bytes=2, available_bytes=1)  # free now, and refused just now
    monkeypatch.setattr(slots, "_RECHECK_S", 0.0)
    assert is_over(needed_bytes=2, available_bytes=1)
    assert not is_over(needed_bytes=1 << 60, available_bytes=1)
    assert not is_over(needed_bytes=2, available_bytes=2)  # it was free when it was refused
