"""A survey proceeds round by round, and ends whatever the nodes do."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrun.agent.cluster import path_probe as path_probe
from ftrun.network.detect.probe_schedule import NetworkPath, schedule, schedule_for
from ftrun.network.detect.rails import match_rails
from ftrun.network.failover.survey import (
    MAX_PATHS,
    ROUND_S,
    SHORT_ROUND_S,
    ProbeSurvey,
    most_kept,
    most_rounds,
    paths_to,
)
from ftrun.recovery.commands import Send
from ftrun.wire.cluster.generation import PathMeasurement, Rail
from ftrun.wire.cluster.messages import ProbePathRequest, ProbePathResult

LIMIT_S = 3.0


def rails_of(nodes: str, count: int = 2) -> dict[str, list[Rail]]:
    return {
        node: [Rail(f"eth{i}", f"10.{i}.0.{at}", 24, 7000 + i) for i in range(count)]
        for at, node in enumerate(nodes, 1)
    }


def survey_of(nodes: str, count: int = 2, **more: object) -> ProbeSurvey:
    matched = match_rails(rails_of(nodes, count))
    rounds = schedule(list(nodes), matched, most_rounds=120).rounds
    return ProbeSurvey(5, rounds, matched, limit_s=LIMIT_S, now_s=0.0, **more)  # type: ignore[arg-type]


def asked(commands: list[Send]) -> list[tuple[str, ProbePathRequest]]:
    found = []
    for one in commands:
        assert isinstance(one.message, ProbePathRequest)
        found.append((one.node_id, one.message))
    return found


def found_by(source: str, order: ProbePathRequest, *, is_dead: bool = False) -> ProbePathResult:
    figures = (0.0, 0.0, "no answer") if is_dead else (1e-4, 1e8, "")
    return ProbePathResult(5, PathMeasurement(source, order.destination, order.rail, *figures))


def run(survey: ProbeSurvey, dead: set[tuple[str, str]] = frozenset()) -> tuple[float, list[int]]:  # type: ignore[assignment]
    """Answers everything; a probe of a dead interface takes 0.4 s, another one 10 ms."""
    now_s, sizes = 0.0, []
    waiting = asked(survey.poll(now_s=now_s))
    while not survey.is_over:
        assert waiting, "it neither asks nor ends"
        sizes.append(len(waiting))
        ends = [{(source, o.rail), (o.destination, o.rail)} for source, o in waiting]
        now_s += 0.4 if any(one & dead for one in ends) else 0.01
        out: list[Send] = []
        for (source, order), one in zip(waiting, ends, strict=True):
            answer = found_by(source, order, is_dead=bool(one & dead))
            out += survey.tried(source, answer, now_s=now_s)
        waiting = asked(out)
    return now_s, sizes


def test_every_path_is_asked_for_with_the_addresses_of_its_rail() -> None:
    survey = survey_of("ab")
    (source, order), *more = asked(survey.poll(now_s=0.0))
    assert (source, more) == ("a", [])
    assert order == ProbePathRequest(5, "b", "eth0", "eth0", "10.0.0.1", "10.0.0.2", 7000)
    survey = survey_of("ab")
    run(survey)
    assert set(survey.found) == {
        NetworkPath(one, other, rail) for one, other in ("ab", "ba") for rail in ("eth0", "eth1")
    }


def test_the_next_round_begins_when_the_last_answer_is_there() -> None:
    survey = survey_of("abcd")
    first = asked(survey.poll(now_s=0.0))
    assert len(first) == 2
    assert survey.tried(first[0][0], found_by(*first[0]), now_s=0.1) == []
    assert len(survey.tried(first[1][0], found_by(*first[1]), now_s=0.1)) == 2


def test_an_answer_to_another_survey_or_of_another_node_changes_nothing() -> None:
    survey = survey_of("ab")
    ((source, order),) = asked(survey.poll(now_s=0.0))
    right = found_by(source, order)
    assert survey.tried(source, ProbePathResult(4, right.found), now_s=0.1) == []
    assert survey.tried("b", right, now_s=0.1) == []
    assert survey.found == {}


def test_an_answer_after_the_end_changes_nothing() -> None:
    survey = survey_of("ab")
    ((source, order),) = asked(survey.poll(now_s=0.0))
    survey.poll(now_s=LIMIT_S)
    assert survey.is_over
    assert survey.tried(source, found_by(source, order), now_s=LIMIT_S + 1) == []
    assert survey.found == {}
    assert survey.poll(now_s=LIMIT_S + 2) == []


def test_a_node_that_does_not_answer_costs_one_round_once() -> None:
    survey = survey_of("abc", 1)
    first = asked(survey.poll(now_s=0.0))
    unresponsive = first[0][0]
    assert survey.poll(now_s=ROUND_S - 0.1) == []
    now_s, waiting = ROUND_S, asked(survey.poll(now_s=ROUND_S))
    while waiting:
        assert unresponsive not in {
            node for source, order in waiting for node in (source, order.destination)
        }
        out: list[Send] = []
        for source, order in waiting:
            out += survey.tried(source, found_by(source, order), now_s=now_s)
        waiting = asked(out)
    assert survey.is_over
    assert len(survey.found) == 2


def test_a_node_that_is_lost_is_not_waited_for() -> None:
    survey = survey_of("abcd", 1)
    first = asked(survey.poll(now_s=0.0))
    survey.lost(first[0][1].destination)
    assert survey.tried(first[1][0], found_by(*first[1]), now_s=0.1)


def test_a_dead_interface_is_given_up_after_two_nodes_have_not_reached_it() -> None:
    survey = survey_of("abcdefgh")
    took_s, _ = run(survey, {("c", "eth1")})
    assert took_s < LIMIT_S
    dead = [path for path, one in survey.found.items() if one.problem]
    assert all("c" in (path.source, path.destination) and path.rail == "eth1" for path in dead)
    assert len({path.source for path in dead} | {path.destination for path in dead}) == 3
    assert len(survey.found) == 8 * 7 * 2 - 14 + len(dead)


def test_a_single_path_that_failed_is_tried_again() -> None:
    survey = survey_of("ab", 1)
    ((source, order),) = asked(survey.poll(now_s=0.0))
    (second,) = asked(survey.tried(source, found_by(source, order, is_dead=True), now_s=0.1))
    (again,) = asked(survey.tried(second[0], found_by(*second), now_s=0.2))
    assert again == (source, order)
    survey.tried(source, found_by(source, order), now_s=0.3)
    assert survey.is_over
    assert not any(one.problem for one in survey.found.values())


def test_a_short_survey_tries_nothing_again() -> None:
    survey = survey_of("ab", 1, is_short=True)
    ((source, order),) = asked(survey.poll(now_s=0.0))
    assert order.is_short
    (second,) = asked(survey.tried(source, found_by(source, order, is_dead=True), now_s=0.1))
    survey.tried(second[0], found_by(*second), now_s=0.2)
    assert survey.is_over


def test_during_a_generation_rounds_keep_their_distance() -> None:
    survey = survey_of("ab", 1, pause_s=0.5)
    ((source, order),) = asked(survey.poll(now_s=0.0))
    assert survey.tried(source, found_by(source, order), now_s=0.1) == []
    assert survey.poll(now_s=0.4) == []
    assert len(survey.poll(now_s=0.5)) == 1


def test_eight_nodes_with_two_rails_take_28_rounds() -> None:
    took_s, sizes = run(survey_of("abcdefgh"))
    assert sizes == [4] * 28
    assert took_s == pytest.approx(0.28)


@given(
    st.integers(2, 9),
    st.lists(st.sampled_from(["answer", "dead", "late", "none", "lost"]), min_size=1, max_size=30),
)
def test_it_ends_in_time_whatever_nodes_do(count: int, moods: list[str]) -> None:
    nodes = "abcdefghi"[:count]
    survey = survey_of(nodes)
    now_s, number, late = 0.0, 0, list[tuple[str, ProbePathRequest]]()
    waiting = asked(survey.poll(now_s=now_s))
    times = [now_s]
    while not survey.is_over:
        out: list[Send] = []
        for source, order in waiting:
            mood = moods[number % len(moods)]
            number += 1
            if mood in ("answer", "dead"):
                answer = found_by(source, order, is_dead=mood == "dead")
                out += survey.tried(source, answer, now_s=now_s)
            elif mood == "lost":
                survey.lost(source)
            elif mood == "late":
                late.append((source, order))
        now_s += 0.25
        times.append(now_s)
        waiting = asked([*out, *survey.poll(now_s=now_s)])
    assert survey.ended_s is not None
    assert survey.ended_s <= LIMIT_S + 0.25
    assert all(one <= other for one, other in pairwise(times))
    for source, order in late:
        assert survey.tried(source, found_by(source, order), now_s=now_s) == []


def test_of_two_tries_of_a_path_the_better_one_counts() -> None:
    survey = survey_of("abcd", 1)
    rates = {("a", "b"): [1e6, 9e5], ("b", "a"): [1e6, 1e8]}
    waiting = asked(survey.poll(now_s=0.0))
    while waiting:
        out: list[Send] = []
        for source, order in waiting:
            mine = rates.get((source, order.destination))
            rate = mine.pop(0) if mine else 1e8
            found = PathMeasurement(source, order.destination, order.rail, 1e-4, rate)
            out += survey.tried(source, ProbePathResult(5, found), now_s=0.1)
        waiting = asked(out)
    assert rates == {("a", "b"): [], ("b", "a"): []}
    assert survey.found[NetworkPath("a", "b", "eth0")].bytes_per_s == 1e6
    assert survey.found[NetworkPath("b", "a", "eth0")].bytes_per_s == 1e8


@pytest.mark.parametrize("num_rails", [1, 2])
@pytest.mark.parametrize("count", [2, 8, 64, 512, 2048, 4096])
def test_with_many_nodes_the_leaders_time_limits_the_probed_paths(
    count: int, num_rails: int
) -> None:
    nodes = [f"n{number}" for number in range(count)]
    rails = {f"eth{number}": nodes for number in range(num_rails)}
    rounds = schedule(nodes, rails, most_rounds=most_rounds(count, num_rails, 40)).rounds
    met = Counter((end, path.rail) for one in rounds for path in one for end in path[:2])
    num_paths = sum(map(len, rounds))
    assert num_paths <= most_kept(count, num_rails)
    assert num_paths <= MAX_PATHS or (count, num_rails) == (4096, 2)
    assert min(met.values()) >= min(4, 2 * (count - 1)), "two others, both ways"
    some = nodes[::2]
    partial = schedule_for(
        some, nodes, rails, most_rounds=most_rounds(2 * len(some), num_rails, 24)
    )
    assert sum(map(len, partial.rounds)) <= most_kept(count, num_rails)


def test_a_node_that_could_not_try_reports_nothing_of_the_path_and_is_asked_again() -> None:
    survey = survey_of("ab", 1)
    ((source, order),) = asked(survey.poll(now_s=0.0))
    answer = found_by(source, order, is_dead=True)
    untried = ProbePathResult(5, answer.found, is_untried=True)
    assert asked(survey.tried(source, untried, now_s=0.1)), "the next round begins"
    assert survey.found == {}
    assert survey.given_up == set()


def test_a_node_that_answers_late_is_asked_again() -> None:
    survey = survey_of("abcd", 1)
    (late, other) = asked(survey.poll(now_s=0.0))
    survey.tried(other[0], found_by(*other), now_s=0.1)
    waiting = asked(survey.poll(now_s=ROUND_S))
    survey.tried(late[0], found_by(*late), now_s=ROUND_S)
    nodes = set()
    while waiting:
        nodes |= {source for source, _ in waiting}
        out: list[Send] = []
        for source, order in waiting:
            out += survey.tried(source, found_by(source, order), now_s=ROUND_S)
        waiting = asked(out)
    assert late[0] in nodes


def test_limits_lie_within_each_other() -> None:
    assert path_probe.DIAL_S + path_probe.TRY_S < ROUND_S
    assert path_probe.SHORT_DIAL_S + path_probe.SHORT_TRY_S < SHORT_ROUND_S


def test_of_many_dead_interfaces_each_is_asked_for_by_two_others_and_all_take_turns() -> None:
    matched = match_rails(rails_of("abcdef"))
    few = paths_to({("c", "eth1")}, matched)
    assert len(few) == 2
    assert all(path[1:] == ("c", "eth1") and path.source != "c" for path in few)
    every = paths_to({(node, "eth0") for node in "abcdef"}, matched)
    assert Counter(path.destination for path in every) == dict.fromkeys("abcdef", 2)
    assert Counter(path.source for path in every) == dict.fromkeys("abcdef", 2)
