"""The phases of a restart follow one another, whatever the ranks have used."""

import pytest

from ftrun.agent.launch.phases import phases_of
from ftrun.ids import version
from ftrun.records.recovery import Recovered
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage, create_page

RESTART = Recovered(
    1,
    "killed",
    noticed_s=10.0,
    stopped_s=10.5,
    decided_s=11.0,
    launched_s=13.1,
    restored=version(0, 7),
)
TIMES = {
    HeartbeatField.STARTED_NS: 14.0,
    HeartbeatField.INIT_GROUP_NS: 16.0,
    HeartbeatField.RESTORE_BEGIN_NS: 19.0,
    HeartbeatField.RESTORE_END_NS: 19.5,
    HeartbeatField.FIRST_STEP_NS: 20.5,
}


def page(**times_s: float) -> SharedPage:
    made = SharedPage(create_page("rank"))
    for field, at_s in (TIMES | {HeartbeatField[key]: at for key, at in times_s.items()}).items():
        made.set(field, round(at_s * 1e9))
    return made


def test_ranks_without_a_device_have_the_phases_of_the_cpu() -> None:
    found = phases_of(RESTART, [page(), page(STARTED_NS=13.5, FIRST_STEP_NS=20.0)], memory_s=0.0)
    assert found == {
        "decide": 0.5, "stop": 0.5, "fork": 3.0, "rendezvous": 2.0, "build": 3.0, "restore": 0.5,
        "first_step": 1.0,
    }  # fmt: skip


def test_ranks_that_stay_restore_before_they_connect() -> None:
    found = phases_of(RESTART, [page(INIT_GROUP_NS=20.0), page(INIT_GROUP_NS=19.9)], memory_s=0.0)
    assert found == {
        "decide": 0.5, "stop": 0.5, "fork": 3.0, "rendezvous": 5.5, "build": 0.0, "restore": 0.5,
        "first_step": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("device_s", "expected"),
    [
        (15.5, {"device": 1.5, "rendezvous": 0.5, "build": 3.0}),
        (17.0, {"rendezvous": 2.0, "device": 1.0, "build": 2.0}),
        (19.2, {"rendezvous": 2.0, "build": 3.0}),
    ],
    ids=["before-the-group", "after-the-group", "in-the-restore"],
)
def test_the_device_has_a_phase_where_the_script_begins_to_use_it(
    device_s: float, expected: dict[str, float]
) -> None:
    found = phases_of(RESTART, [page(DEVICE_NS=device_s), page()], memory_s=2.0)
    assert sum(found.values()) == 20.5 - 10.0
    first = {"decide": 0.5, "stop": 0.5, "device_memory": 2.0, "fork": 1.0}
    order = {**first, **expected, "restore": 0.5, "first_step": 1.0}
    assert list(found.items()) == list(order.items())
