"""Pressure on a node, in words."""

from ftrun.monitor.slow.host_pressure import HostPressure


def test_a_resource_that_tasks_waited_for_is_named_with_its_share() -> None:
    assert HostPressure(cpu=63.4, memory=9.9, io=10.0).texts == (
        "tasks waited for a processor in 63 % of the last 10 s (PSI)",
        "tasks waited for a disk in 10 % of the last 10 s (PSI)",
    )
    assert HostPressure(memory=12.0).texts == (
        "tasks waited for memory in 12 % of the last 10 s (PSI)",
    )
    assert HostPressure().texts == ()
