"""Slurm's host lists expand to their names, and a step is recognized by its variables."""

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrun.cli.launch.slurm import SlurmStep, expand_hosts, slurm_step
from ftrun.errors import UsageError

STEP = {
    "SLURM_CLUSTER_NAME": "big one",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "n[08-11],login",
    "SLURM_STEP_NUM_NODES": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURMD_NODENAME": "n09",
    # Values of the job and of the task: a later step has others, so they must not matter.
    "SLURM_JOB_NODELIST": "dead[1-9]",
    "SLURM_NNODES": "9",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "3",
}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-2,07-12],m3", ["n1", "n2", "n07", "n08", "n09", "n10", "n11", "n12", "m3"]),
        ("a,b,c", ["a", "b", "c"]),
        ("n[7]", ["n7"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("n[1-2]-ib.cluster", ["n1-ib.cluster", "n2-ib.cluster"]),
        ("c_1,x.y-z[3,5]", ["c_1", "x.y-z3", "x.y-z5"]),
    ],
)
def test_lists_as_slurm_writes_them(text: str, names: list[str]) -> None:
    assert expand_hosts(text) == names


@pytest.mark.parametrize(
    "text",
    ["", ",", "n1,", "n[1-2", "n1-2]", "n[]", "n[a-b]", "n[2-1]", "n[1-]", "n[[1]]", "n 1", "n\n1"],
)
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        expand_hosts(text)


@pytest.mark.parametrize("text", ["n[0-99999999999]", "n[0-999]m[0-999]", "n[1-65000],m[1-65000]"])
def test_a_list_longer_than_any_cluster_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        expand_hosts(text)


_names = st.from_regex(r"[a-z]{1,5}([.-][a-z]{1,3})?", fullmatch=True)
_ranges = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 12), st.integers(1, 4)), min_size=1, max_size=3
)
_words = st.lists(
    st.tuples(_names, st.lists(st.tuples(_ranges, st.sampled_from(["", "x", "-ib"])), max_size=2)),
    min_size=1,
    max_size=4,
)


@given(_words)
def test_any_list_is_what_it_was_made_of(
    words: list[tuple[str, list[tuple[list[tuple[int, int, int]], str]]]],
) -> None:
    texts, names = [], []
    for name, brackets in words:
        text, choices = name, [[name]]
        for ranges, behind in brackets:
            parts, numbers = [], []
            for first, more, width in ranges:
                start = f"{first:0{width}}"
                parts.append(start if more == 0 else f"{start}-{first + more}")
                numbers += [f"{n:0{len(start)}}" for n in range(first, first + more + 1)]
            text += f"[{','.join(parts)}]{behind}"
            choices += [numbers, [behind]]
        texts.append(text)
        names += ["".join(one) for one in itertools.product(*choices)]
    assert expand_hosts(",".join(texts)) == names


@given(st.text(alphabet="n1[]-,. x\n", max_size=30))
def test_noise_is_a_list_or_a_usage_error(text: str) -> None:
    try:
        found = expand_hosts(text)
    except UsageError:
        return
    assert found
    assert not any(char in name for name in found for char in "[], \n")


def test_a_step_is_known_by_its_own_variables() -> None:
    step = slurm_step(STEP)
    assert step == SlurmStep("big-one", 4711, 2, 5, "n[08-11],login", "n09")
    assert step.first_node == "n08"
    assert step.key == "big-one-4711-2"
    assert 15000 <= step.port < 25000


def test_neighbouring_steps_have_other_ports() -> None:
    ports = set()
    for job, number in itertools.product(range(4700, 4720), range(5)):
        step = slurm_step({**STEP, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(number)})
        assert step is not None
        ports.add(step.port)
    assert len(ports) == 100


def test_each_life_of_a_job_has_what_no_other_has() -> None:
    lives = [slurm_step({**STEP, "SLURM_RESTART_COUNT": count}) for count in ("", "0", "1", "12")]
    keys, ports = [], []
    for step in lives:
        assert step is not None
        keys.append(step.key)
        ports.append(step.port)
    assert keys == ["big-one-4711-2", "big-one-4711-2", "big-one-4711-2-r1", "big-one-4711-2-r12"]
    assert len(set(ports)) == 3
    last = lives[-1]
    assert last is not None
    assert last.earlier_keys[:2] == keys[1:3]
    assert last.key not in last.earlier_keys
    assert len(last.earlier_keys) == 12


@pytest.mark.parametrize(
    "other",
    [
        {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_NUM_TASKS": "10"},
        {"SLURM_STEP_ID": ""},
        {"SLURM_JOB_ID": ""},
        {"SLURM_STEP_NUM_NODES": "many"},
    ],
    ids=repr,
)
def test_any_other_step_is_none(other: Mapping[str, str]) -> None:
    assert slurm_step({**STEP, **other}) is None
    assert slurm_step({}) is None


def test_a_list_of_another_length_is_not_believed() -> None:
    step = slurm_step({**STEP, "SLURM_STEP_NODELIST": "n[1-3]"})
    assert step is not None
    with pytest.raises(UsageError) as caught:
        assert step.first_node
    assert "--rdzv-endpoint" in str(caught.value)
