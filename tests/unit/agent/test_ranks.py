"""Times for which nothing has changed in a group, over several observations."""

from msgspec.structs import replace

from ftrun.agent.observe.ranks import _GroupMemory
from ftrun.monitor.verdicts import OpenMessage, ProcessGroupView


def test_a_group_is_still_until_something_is_called_or_over() -> None:
    memory = _GroupMemory()
    one = ProcessGroupView("0", "dp", (0, 1), (), 5, 3.0, enqueued=6)
    message = OpenMessage("send", 1, 7, 3.0)
    seen = [
        (0.0, one),
        (2.0, replace(one, waits_s=5.0)),
        (3.0, replace(one, enqueued=7)),
        (4.0, replace(one, enqueued=7)),
        (5.0, replace(one, enqueued=7, waits_seq=6)),
        (6.0, replace(one, enqueued=7, waits_seq=6, messages=(message,))),
        (8.0, replace(one, enqueued=7, waits_seq=6, messages=(replace(message, waits_s=5.0),))),
    ]
    found = [memory.with_times(3, [group], now_s)[0].still_s for now_s, group in seen]
    assert found == [0.0, 2.0, 0.0, 1.0, 0.0, 0.0, 2.0]
    assert memory.with_times(4, [seen[-1][1]], 9.0)[0].still_s == 0.0
    memory.clear()
    assert memory.with_times(3, [seen[-1][1]], 9.0)[0].still_s == 0.0
