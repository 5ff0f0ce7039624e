"""RestartBudget: a burst uses it up, time gives it back."""

from ftrun.recovery.supervisor import RestartBudget


def test_budget_is_spent_after_its_limit() -> None:
    budget = RestartBudget(2, 60.0)
    assert not budget.is_spent(now_s=0.0)
    budget.spend(now_s=0.0)
    budget.spend(now_s=1.0)
    assert budget.is_spent(now_s=2.0)


def test_restarts_older_than_the_window_do_not_count() -> None:
    budget = RestartBudget(1, 60.0)
    budget.spend(now_s=0.0)
    assert budget.is_spent(now_s=60.0)
    assert not budget.is_spent(now_s=60.1)
    assert budget.used(now_s=60.1) == 0


def test_a_reader_in_another_thread_changes_nothing() -> None:
    budget = RestartBudget(1, 60.0)
    budget.spend(now_s=0.0)
    assert budget.used(now_s=61.0) == 0
    assert budget.used(now_s=60.0) == 1, "a look at a later time forgets nothing"
    assert budget.ages_s(now_s=60.0) == [60.0]
    budget.spend(now_s=61.0)
    assert budget.used(now_s=60.0) == 1


def test_budget_without_a_window_never_comes_back() -> None:
    budget = RestartBudget(1, None)
    budget.spend(now_s=0.0)
    assert budget.is_spent(now_s=1e9)


def test_budget_of_zero_is_spent_from_the_start() -> None:
    assert RestartBudget(0, None).is_spent(now_s=0.0)


def test_budget_reads_as_words() -> None:
    assert str(RestartBudget(3, None)) == "3 restarts"
    assert str(RestartBudget(3, 60.0)) == "3 restarts in 60 s"
