"""What an agent leaves to the next one of its node: the newer word counts."""

import msgspec

from ftrun.agent.snapshots.retained_memory import PersistedAgentState, decode_state, newer
from tests.unit.recovery.made import plan

OLD = PersistedAgentState(plan(3, "ab"), took_effect=True)
NEW = PersistedAgentState(plan(4, "ab"), took_effect=False)


def test_the_newer_plan_counts_whoever_kept_it() -> None:
    assert newer(OLD, NEW).plan == newer(NEW, OLD).plan == NEW.plan
    roster = msgspec.structs.replace(NEW, plan=msgspec.structs.replace(plan(4, "ab"), roster=1))
    assert newer(NEW, roster).plan == roster.plan


def test_of_one_plan_the_word_that_it_took_effect_counts() -> None:
    took_effect = msgspec.structs.replace(NEW, took_effect=True)
    assert newer(NEW, took_effect).took_effect
    assert newer(took_effect, NEW).took_effect


def test_where_one_has_nothing_the_other_counts() -> None:
    nothing = decode_state(b"")
    assert newer(nothing, OLD) == newer(OLD, nothing) == OLD
    assert newer(nothing, nothing) == PersistedAgentState()


def test_what_was_kept_is_read_again_and_what_another_version_kept_is_not() -> None:
    assert decode_state(OLD.encode()) == OLD
    assert decode_state(b'{"plan": {"of": "another version"}}') == PersistedAgentState()
