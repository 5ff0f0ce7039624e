"""The delay until the stub starts the next agent."""

from ftrun.cli.stub import pause_s


def test_only_an_agent_that_ends_repeatedly_delays_the_next() -> None:
    # No start is within the window: the last agent had lived longer than that.
    assert [pause_s(starts) for starts in range(7)] == [0.0, 0.0, 0.1, 0.5, 2.0, 5.0, 5.0]
