"""Judges one node's measurements, and compares those of all nodes."""

import msgspec
import pytest

from ftrun.config.profile import PreflightConfig
from ftrun.monitor.node_fitness import (
    CheckOutcome,
    NodeFitness,
    NodeMeasurements,
    far_below,
    judge,
    rate_per_s_text,
    size_text,
)

FLOORS = PreflightConfig(
    min_memory_gb_s=1.0,
    min_loopback_mb_s=20.0,
    min_link_mb_s=0.5,
    min_free_memory_mb=128.0,
    min_free_disk_mb=64.0,
    min_open_files=256,
    min_processes=64,
)
NO_FLOORS = PreflightConfig(
    **{key: 0 for key in PreflightConfig.__struct_fields__ if key.startswith("min_")}
)
GOOD = NodeMeasurements(
    memory_bytes_per_s=8e9,
    loopback_rtt_s=2e-5,
    loopback_bytes_per_s=9e8,
    free_memory_bytes=4 << 30,
    free_disk_bytes=1 << 30,
    open_files=1024,
    processes=4000,
    link_to="node0",
    link_rtt_s=1e-4,
    link_bytes_per_s=1e8,
)


def figures(**changes: object) -> NodeMeasurements:
    return msgspec.structs.replace(GOOD, **changes)


def test_good_figures_pass() -> None:
    found = judge(GOOD, FLOORS, number=3, is_whole=False)
    assert found == NodeFitness(CheckOutcome.PASS, GOOD, number=3, is_whole=False)
    assert found.is_fit
    assert str(found) == "fit"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"memory_bytes_per_s": 4.9e8}, "memory is copied at 490 MB/s (minimum 1.0 GB/s)"),
        ({"loopback_bytes_per_s": 5e6}, "the loopback carries 5.0 MB/s (minimum 20 MB/s)"),
        ({"link_bytes_per_s": 1e5}, "the link to node0 carries 0.1 MB/s (minimum 0.5 MB/s)"),
        ({"free_memory_bytes": 100_000_000}, "100 MB of memory are free (minimum 128 MB)"),
        ({"open_files": 64}, "64 open files are allowed (ulimit -n; minimum 256)"),
        ({"processes": 3}, "3 more processes can be started (ulimit -u; minimum 64)"),
        ({"clock": "the monotonic clock goes backwards"}, "the monotonic clock goes backwards"),
        ({"gpu_faults": ("GPU 2 needs a reset",)}, "GPU 2 needs a reset"),
    ],
)
def test_what_ranks_cannot_run_with_is_a_failure(changes: dict[str, object], problem: str) -> None:
    found = judge(figures(**changes), FLOORS)
    assert found.outcome is CheckOutcome.FAIL
    assert not found.is_fit
    assert found.problems == (problem,)
    assert str(found) == problem


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"free_disk_bytes": 1_000_000}, "1.0 MB of disk for the logs are free (minimum 64 MB)"),
        ({"gpu_remarks": ("GPU 0 is slowed down",)}, "GPU 0 is slowed down"),
        ({"not_done": "the loopback was not measured"}, "the loopback was not measured"),
    ],
)
def test_what_only_costs_something_is_a_warning(changes: dict[str, object], warning: str) -> None:
    found = judge(figures(**changes), FLOORS)
    assert found.outcome is CheckOutcome.WARN
    assert found.is_fit
    assert found.warnings == (warning,)


def test_what_was_not_measured_reports_nothing() -> None:
    assert judge(NodeMeasurements(), FLOORS).outcome is CheckOutcome.PASS


def test_a_floor_of_nothing_is_none() -> None:
    poor = figures(memory_bytes_per_s=1.0, open_files=0, free_memory_bytes=0)
    assert judge(poor, NO_FLOORS).outcome is CheckOutcome.PASS


def test_a_node_far_below_the_others_is_reported() -> None:
    all_of_them = {
        "a": figures(memory_bytes_per_s=8e9),
        "b": figures(memory_bytes_per_s=3e9, link_bytes_per_s=1e7),
        "c": figures(memory_bytes_per_s=7e9),
        "d": figures(memory_bytes_per_s=0.0, link_bytes_per_s=0.0),
    }
    assert far_below(all_of_them, 0.5) == {
        "b": "memory is copied at 3.0 GB/s (other nodes 7.5 GB/s); the link carries 10 MB/s "
        "(other nodes 100 MB/s)"
    }
    assert far_below(all_of_them, 0.1) == {}


def test_rates_of_a_busy_machine_are_not_compared() -> None:
    found = {one: figures(memory_bytes_per_s=8e9) for one in "ac"}
    found["b"] = figures(memory_bytes_per_s=3e9, processor_share=0.4)
    assert far_below(found, 0.5) == {}


def test_of_two_nodes_none_is_the_slow_one() -> None:
    two = {"a": figures(memory_bytes_per_s=8e9), "b": figures(memory_bytes_per_s=1e9)}
    assert far_below(two, 0.5) == {}


def test_sizes_are_read_easily() -> None:
    assert rate_per_s_text(15_210_000_000) == "15.2 GB/s"
    assert size_text(128_000_000) == "128 MB"
    assert size_text(400_000) == "0.4 MB"


def test_it_survives_the_wire() -> None:
    found = judge(figures(clock="odd"), FLOORS)
    assert msgspec.json.decode(msgspec.json.encode(found), type=NodeFitness) == found
