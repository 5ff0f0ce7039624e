"""The scheduler's settings are read from ftrun's own arguments; unreadable ones are errors."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrun.cli.screen.text import seconds_of, size_of
from ftrun.errors import FtrunError, UsageError
from ftrun.tools.manifests.job import (
    GIB,
    OWN_BYTES,
    JobOptions,
    MachineSpec,
    ManifestJob,
    job_of,
    quantity,
)


def job(words: str, machine: MachineSpec | None = None, **more: str) -> ManifestJob:
    return job_of(words.split(), machine or MachineSpec(), JobOptions(**more))


def refused(words: str, machine: MachineSpec | None = None, **more: str) -> str:
    with pytest.raises(UsageError) as caught:
        job(words, machine, **more)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("train.py", (1, 1, 0, 1)),
        ("--standalone --nproc-per-node 2 train.py", (1, 1, 0, 2)),
        ("--nnodes 4 --spares 1 --nproc_per_node=8 train.py --nnodes 9", (4, 4, 1, 8)),
        ("--nnodes 2:4 -- train.py", (2, 4, 0, 1)),
        ("--nnodes 3 --nproc-per-node gpu -m my.training", (3, 3, 0, 4)),
        ("--nproc-per-node cpu train.py", (1, 1, 0, 64)),
        ("--nproc-per-node auto train.py", (1, 1, 0, 4)),
    ],
)
def test_nodes_and_ranks(words: str, found: tuple[int, int, int, int]) -> None:
    made = job(words, MachineSpec(cpus=64, gpus=4))
    assert (made.least, made.most, made.spares, made.ranks) == found
    assert made.nodes == found[1] + found[2]


def test_flags_and_script_stay_as_typed() -> None:
    made = job("--nnodes 2 --spares=1 -- train.py --lr 1e-4 --nnodes 7")
    assert made.flags == ("--nnodes", "2", "--spares=1")
    assert made.script == ("--", "train.py", "--lr", "1e-4", "--nnodes", "7")
    assert made.stem == "train"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "no script is given"),
        ("--nnodes 4", "no script is given"),
        ("--nnodes 4 --sparse 1 train.py", "--sparse is not a flag"),
        ("--nnodes 4:2 train.py", "--nnodes is a number of nodes"),
        ("--nproc-per-node gpu train.py", "Give the number of its devices with --gpus N"),
        ("--nproc-per-node cpu train.py", "with --cpus N"),
        ("--nproc-per-node many train.py", "--nproc-per-node is a whole number"),
        ("--nnodes 2 --node-rank 0 train.py", "--node-rank is for one node"),
        ("--nnodes 2 --bind 10.0.0.1 train.py", "--bind is for one node"),
        ("--nnodes 2 --rdzv-endpoint n1 train.py", "--rdzv-endpoint is set by the scheduler"),
        ("--nnodes 2 --standalone train.py", "--standalone means one node alone"),
        ("--profile nowhere.yaml train.py", "nowhere"),
        ("--set checkpoint.evry_s=1 train.py", "evry_s"),
        ("train.py \udcff", "is not UTF-8"),
    ],
)
def test_what_cannot_be_is_reported(words: str, said: str) -> None:
    with pytest.raises(FtrunError) as caught:
        job(words)
    assert said in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_engine_of_their_own_may_be_named() -> None:
    made = job("--nnodes 2 --rdzv-backend etcd --rdzv-endpoint e:2379 train.py")
    assert "e:2379" in made.flags


# --- memory and times -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "flags", "times"),
    [
        (1, "", 2.0),
        (1, "--no-snapshots", 0.0),
        (2, "", 4.0),
        (4, "", 2 * (1 + 1 / 3)),
        (8, "", 2 * (1 + 2 / 6)),
        (16, "--erasure 6+2", 2 * (1 + 2 / 6)),
        (4, "--erasure none", 2.0),
    ],
)
def test_snapshots_take_two_slots_and_parity(nodes: int, flags: str, times: float) -> None:
    """As in docs/many-nodes.md: 2 (1 + M/K) S."""
    words = f"--nnodes {nodes} --nproc-per-node 2 {flags} train.py"
    made = job(words, MachineSpec(memory="100Gi", state="3Gi"))
    assert made.snapshot_bytes == math.ceil(3 * GIB * 2 * times)
    assert made.memory_bytes(5) == 100 * GIB + made.snapshot_bytes + 5 + OWN_BYTES


def test_what_was_not_reported_is_not_invented() -> None:
    assert job("train.py").memory_bytes() is None
    assert job("train.py", MachineSpec(state="1Gi")).memory_bytes() is None
    made = job("train.py", MachineSpec(memory="1Gi"))
    assert made.memory_bytes() == GIB + OWN_BYTES
    assert "--state was not given" in made.memory_text()


def test_a_checkpoint_that_takes_long_gets_its_time() -> None:
    """After a signal the run has the time of --grace for the last checkpoint."""
    assert job("train.py").ending_s == 2 * 30 + 10
    assert job("--grace 45 train.py").ending_s == 2 * 45 + 10
    made = job("--nnodes 2 --nproc-per-node 8 train.py", MachineSpec(state="20G"))
    assert made.flags[:2] == ("--grace", "800")
    assert made.ending_s == 2 * 800 + 10
    made = job("train.py", MachineSpec(state="20G"), last_checkpoint="20s")
    assert (made.flags, made.ending_s) == ((), 70)
    said = refused("--grace 45 train.py", last_checkpoint="2m")
    assert "--grace 45 gives the last checkpoint 45 s, and it takes 120 s" in said


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1", 1), ("2K", 2000), ("64Gi", 64 * GIB), ("1.5GiB", 3 * GIB // 2), ("16GB", 16 * 10**9)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert size_of(text, "--memory") == num_bytes


@pytest.mark.parametrize("text", ["", "0", "Gi", "-1Gi", "1 Gi", "1g", "1e9", "99999999Ti", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--memory is a size such as 64Gi"):
        size_of(text, "--memory")


@given(st.integers(1, 1 << 50))
def test_a_quantity_is_never_less(num_bytes: int) -> None:
    found = size_of(quantity(num_bytes), "--memory")
    assert num_bytes <= found < num_bytes + (1 << 20)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90m", 5400), ("24h", 86_400), ("0.5h", 1800), ("12:00:01", 43_201), ("7-00:00:00", 604_800)],
)
def test_times(text: str, seconds: int) -> None:
    assert seconds_of(text, "--time") == seconds


@pytest.mark.parametrize("text", ["", "90", "0m", "-1h", "1:2", "1d2h", "infinite"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--time is a time such as 90m"):
        seconds_of(text, "--time")
