"""When the stub starts the next agent."""

from ftrun.cli.stub import pause_s


def test_only_an_agent_that_ends_again_and_again_is_waited_for() -> None:
    # None within the window: the last one had lived longer than that.
    assert [pause_s(starts) for starts in range(7)] == [0.0, 0.0, 0.1, 0.5, 2.0, 5.0, 5.0]
