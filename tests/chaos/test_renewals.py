"""A rank that dies while it is parked, restored or connected changes no bit."""

from pathlib import Path

import pytest

from tests.chaos.test_survivors import Expected, begin, expected, result, staying

__all__ = ["expected"]  # the fixture

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]

PLACES = ("revoked", "parked", "launched", "restored", "ready", "connected", "joined")


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_dies_while_it_is_renewed_changes_no_bit(
    place: str, tmp_path: Path, expected: Expected
) -> None:
    once = tmp_path / "once"
    variables = {"FTRUN_CRASH_AT": f"worker.renew.{place}", "FTRUN_CRASH_ONCE": str(once)}
    run = begin(tmp_path, 2, "ddp", "1:20:backward", env=variables)
    try:
        assert run.wait() == 0, run.text
        assert once.exists()
        assert staying(run)[-1] == [], "all ranks start again"
        assert result(run, 2) == expected(2, "ddp")
    finally:
        run.end()
