"""The summary line of status states the effect of the next lost node on the training."""

from dataclasses import replace

import pytest

from ftrun.agent.publish.summary_line import (
    Activity,
    ProtectionSummary,
    activity_text,
    next_loss_text,
)

HAS = ProtectionSummary(
    members=2, spares=1, min_nodes=2, voters=3, votes=3, survives=1, groups=1, committed=1080,
    unprotected="",
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "survives any 1 node, back to step 1,080"),
        (
            {"members": 4, "spares": 0, "min_nodes": 4, "voters": 4, "votes": 4},
            "the next lost node pauses",
        ),
        (
            {"members": 4, "spares": 0, "min_nodes": 3, "voters": 4, "votes": 4},
            "survives any 1 node,",
        ),
        (
            {"spares": 0, "min_nodes": 1, "voters": 2, "votes": 2},
            "the next lost node pauses the run",
        ),
        ({"spares": 0, "min_nodes": 1, "voters": 3, "votes": 3}, "survives any 1 node,"),
        ({"members": 2, "spares": 2, "voters": 4, "votes": 4}, "survives any 1 node,"),
        # Half of the voters would be left, which is no majority; lost voters count too.
        ({"members": 2, "spares": 1, "voters": 4, "votes": 3}, "the next lost node pauses"),
        ({"members": 2, "spares": 2, "voters": 5, "votes": 4}, "survives any 1 node,"),
        ({"spares": 1, "voters": 4, "votes": 2}, "the next lost node pauses"),
        (
            {"survives": 2, "members": 6, "min_nodes": 6, "voters": 7, "votes": 7},
            "survives any 1 node,",
        ),
        (
            {
                "survives": 2,
                "members": 6,
                "min_nodes": 6,
                "spares": 2,
                "voters": 8,
                "votes": 8,
                "groups": 2,
            },
            "survives any 2 nodes of each group,",
        ),
        ({"survives": 0}, "the state of a lost node cannot be rebuilt"),
        (
            {"survives": 0, "earlier": -1},
            "the state of a lost node cannot be rebuilt until this generation has protected it",
        ),
        ({"earlier": 4}, "survives any 1 node, back to step 1,080, as protected in generation 4"),
        ({"committed": None}, "no snapshot is protected yet"),
        ({"unprotected": "memory is full"}, "UNPROTECTED: memory is full"),
    ],
)
def test_the_next_loss(changes: dict[str, object], words: str) -> None:
    assert words in next_loss_text(replace(HAS, **changes))  # type: ignore[arg-type]


def test_a_state_that_is_kept_is_not_a_training_that_continues() -> None:
    words = next_loss_text(replace(HAS, spares=0, voters=2, votes=2))
    assert "survives" not in words
    assert "its state is kept at step 1,080" in words


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (Activity(80, 60, has_stepped=True), "running at step 80 on 4 nodes"),
        (Activity(0, 60, has_stepped=False), "starting from step 60 on 4 nodes, no step yet"),
        (Activity(80, 60, has_stepped=True, end="stopping"), "stopping at step 80 on 4 nodes"),
        (
            Activity(80, 60, has_stepped=False, unresponsive_s=9.0, end="ending"),
            "ending at step 80 on",
        ),
        (Activity(80, 60, has_stepped=True, unresponsive_s=12.3), "NO STEP for 12 s at step 80"),
        (
            Activity(80, 60, has_stepped=True, unresponsive_s=12.3, hang="a link"),
            "on 4 nodes: a link",
        ),
    ],
)
def test_what_the_ranks_do(now: Activity, words: str) -> None:
    assert words in activity_text(now, "4 nodes")
