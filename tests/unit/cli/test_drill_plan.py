"""A drill plan is checked key by key, and lists the faults and their targets."""

from pathlib import Path

import pytest

from ftrun.cli.launch.profiles import find_profile, profile_names
from ftrun.errors import ProfileInvalid, UsageError
from ftrun.tools.drill.plan import (
    DrillPlan,
    drill_plan_names,
    find_drill_plan,
    plan_from,
    read_drill_plan,
    trials_of,
)


def problems(found: object) -> list[str]:
    with pytest.raises(ProfileInvalid) as caught:
        plan_from(found, "plan.yaml")
    return list(caught.value.problems)


def names(plan: DrillPlan) -> list[tuple[str, str, int]]:
    return [(one.kind, one.target, part.nodes) for part in plan.parts() for one in trials_of(part)]


def test_each_rank_in_turn_and_so_often() -> None:
    plan = plan_from(
        {
            "nodes": 2,
            "ranks": 1,
            "faults": [
                {"kind": "hang", "rank": "each"},
                {"kind": "segv", "rank": [1, 0]},
                {"kind": "smp-kill", "node": 1, "repeat": 2},
                {"kind": "abort"},
            ],
        },
        "",
    )
    assert [target for _, target, _ in names(plan)] == [
        "rank 0", "rank 1", "rank 1", "rank 0", "node 1", "node 1", "rank 1",
    ]  # fmt: skip


def test_parts_take_over_what_the_plan_sets() -> None:
    plan = plan_from(
        {
            "ranks": 3,
            "set": {"hang.kill_after_s": 5, "restart.budget": 7},
            "faults": [{"kind": "abort"}],
            "runs": [
                {"faults": [{"kind": "segv"}]},
                {"ranks": 1, "set": {"restart.budget": 9}, "faults": [{"kind": "gil-hold"}]},
            ],
        },
        "",
    )
    own, first, second = plan.parts()
    assert (own.ranks, first.ranks, second.ranks) == (3, 3, 1)
    assert first.settings == {"hang.kill_after_s": 5, "restart.budget": 7}
    assert second.settings == {"hang.kill_after_s": 5, "restart.budget": 9}
    assert [len(part.faults) for part in plan.parts()] == [1, 1, 1]


def test_what_a_plan_expects_wins_over_the_catalogue() -> None:
    expect = {"verdict": "busy loop", "culprits": [0, 1], "within_s": "1m", "equal": False}
    plan = plan_from(
        {"faults": [{"kind": "hang", "rank": 1, "for": "2s", "expect": expect, "alone": True}]}, ""
    )
    (one,) = trials_of(plan.parts()[0])
    assert one.lasts_s == 2.0
    assert one.expected.verdicts == ("busy loop",)
    assert (one.expected.culprits, one.expected.within_s) == ((0, 1), 60.0)
    assert (one.expected.equal, one.expected.alone, one.expected.action) == (
        False, True, ("respawn",),
    )  # fmt: skip
    (usual,) = trials_of(plan_from({"faults": [{"kind": "smp-kill"}]}, "").parts()[0])
    assert usual.expected.verdicts == ()


def test_wrong_keys_and_values_are_named_with_what_was_meant() -> None:
    assert problems({"falts": []}) == ["falts: there is no such key; did you mean faults?"]
    assert problems({"runs": [{"fualts": []}]}) == [
        "runs[0].fualts: there is no such key; did you mean faults?"
    ]
    assert problems({"faults": [{"kind": "segv", "rnk": 1}]}) == [
        "faults[0].rnk: there is no such key; did you mean rank?"
    ]
    (said,) = problems({"faults": [{"kind": "segv", "expect": {"verdikt": "x"}}]})
    assert said == "faults[0].expect.verdikt: there is no such key; did you mean verdict?"
    (said,) = problems({"ranks": "two", "faults": [{"kind": "segv"}]})
    assert said == "ranks: should be a whole number from 1 to 64, and is 'two'"
    assert problems(["segv"]) == ["a plan holds keys with values, such as faults"]
    (said,) = problems({"faults": [{"kind": "segv", "for": "soon"}]})
    assert "such as 500ms" in said


def test_all_mistakes_are_reported_at_once_each_with_its_place() -> None:
    found = problems(
        {
            "set": {"hang.kill_after": 5, "restart.budget": "many", "hang": 1},
            "pace": "quick",
            "faults": [
                {"kind": "segv", "rank": -1},
                {"kind": "segv", "rank": []},
                {"kind": "segv", "rank": [0, -2]},
                {"kind": "segv", "rank": True},
                {"kind": "hang", "for": "soon", "expect": {"within_s": "-5s"}},
                {"kind": "hagn"},
            ],
            "runs": [
                {
                    "set": {"nowhere.key": 1},
                    "faults": [{"kind": "hang", "expect": {"verdict": ["frozn", "crash"]}}],
                }
            ],
        }
    )
    places = [one.partition(":")[0] for one in found]
    assert sorted(places) == sorted(
        [
            *3 * ("set",),
            "pace",
            *(f"faults[{at}].rank" for at in range(4)),
            "faults[4].for",
            "faults[4].expect.within_s",
            "faults[5].kind",
            "runs[0].set",
            "runs[0].faults[0].expect.verdict[0]",
        ]
    )
    said = "\n".join(found)
    assert "[0].rank: should be a rank (0 or more), a list of ranks, or each, and is -1" in said
    assert "and is 'frozn'; did you mean frozen?" in said
    for part in ("kill_after_s", "restart.budget", "not 'hang'"):
        assert any(part in one for one in found if one.startswith("set: "))
    plan_from({"faults": [{"kind": "smp-kill", "expect": {"verdict": []}}]}, "")


def test_what_makes_no_sense_is_reported_before_anything_is_started() -> None:
    assert problems({}) == ["it orders nothing: give it faults, or runs with faults"]
    (said,) = problems({"faults": [{"kind": "rank-kil"}]})
    assert said.endswith("unknown fault 'rank-kil'. Did you mean rank-kill?")
    (said,) = problems({"faults": [{"kind": "segv", "rank": 2}]})
    assert said.endswith("there is no rank 2 among 2")
    (said,) = problems({"faults": [{"kind": "segv", "node": 0}]})
    assert said.endswith("segv is done to a rank, not to a node")
    (said,) = problems({"nodes": 2, "faults": [{"kind": "freeze"}]})
    assert said.endswith("freeze: which node?")
    (said,) = problems({"args": ["x"], "faults": [{"kind": "segv"}]})
    assert said.endswith("args and notes go with a script of yours, or args with job gpt")
    (said,) = problems({"set": {"hang": 1}, "faults": [{"kind": "segv"}]})
    assert "keys are such as hang.kill_after_s, not 'hang'" in said
    (said,) = problems({"faults": [{"kind": "segv", "repeat": 100, "rank": [0] * 30}]})
    assert said == "it orders 3000 faults, and a plan orders 2000 at most"


def test_file_with_an_alias_or_no_yaml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("faults: &a [*a]\n")
    with pytest.raises(ProfileInvalid, match="aliases"):
        read_drill_plan(path)
    path.write_text("faults: [\n")
    with pytest.raises(ProfileInvalid, match="line 2"):
        read_drill_plan(path)


def test_plans_that_come_with_ftrun() -> None:
    assert drill_plan_names() == ["drill", "drill-hangs", "drill-quick", "drill-slow"]
    for name in drill_plan_names():
        assert read_drill_plan(find_drill_plan(name)).about
    quick = names(read_drill_plan(find_drill_plan("quick")))
    assert len(quick) == 10
    assert {nodes for _, _, nodes in quick} == {1}
    hangs = names(read_drill_plan(find_drill_plan("hangs")))
    assert len(hangs) >= 40
    assert {(kind, target, nodes) for kind, target, nodes in hangs} >= {
        (kind, f"rank {rank}", nodes)
        for kind in (
            "hang",
            "gil-hold",
            "busy-loop",
            "stop",
            "collective-skip",
            "exit0-early",
            "slow-input",
        )
        for rank in range(4)
        for nodes in (2, 4)
    }


def test_a_drill_plan_is_no_profile_and_no_profile_a_plan() -> None:
    assert not [name for name in profile_names() if "drill" in name]
    with pytest.raises(UsageError, match="there is no profile 'drill'"):
        find_profile("drill")
    with pytest.raises(UsageError, match=r"there is no drill plan 'dril'.* Did you mean drill\?"):
        find_drill_plan("dril")
