"""A node that ends alone, drained or rejected, does not end the run in its report."""

from typing import Any

from made_journals import MadeJournal

from ftrun.tools.report.run import run_facts


def begun() -> MadeJournal:
    """Four nodes, with a crash and a hang."""
    made = MadeJournal(ranks=8, nodes=4)
    made.begin()
    made.crash(70.0, 190, 1)
    made.hang(100.0, 300, culprit=3)
    return made


def drain(made: MadeJournal, t: float) -> None:
    """A spare takes the ranks of node3, and training continues."""
    made.put(t, "leave_requested", node="node3", by="SIGTERM to ftrun")
    made.recover(t + 2.0, "draining node3", 640, None)
    end(made, t + 4.0, "node3", 143, run_continues=True)


def end(made: MadeJournal, t: float, node: str, code: int, *, run_continues: bool = False) -> None:
    ends: dict[str, Any] = {"exit_code": code, "reason": "this node ends"}
    made.put(t, "run_end_decided", node=node, run_continues=run_continues, **ends)
    made.put(t + 0.01, "run_ended", node=node, **ends)


def join(made: MadeJournal, t: float, node: str) -> None:
    made.put(t, "run_started", node=node, run_id=made.run_id, script="/home/me/train.py",
             torch="2.13.0+cu128", logs="")  # fmt: skip


def later(made: MadeJournal, by_s: float) -> list[dict[str, Any]]:
    return [
        {**one, "time": one["time"] + by_s, "monotonic_s": one["monotonic_s"] + by_s}
        for one in made.entries
    ]


def test_a_drained_node_neither_ends_the_run_nor_has_an_incident() -> None:
    made = begun()
    drain(made, 200.0)
    facts = run_facts(made.raw(), is_alive=True)
    assert (facts.state, facts.exit_code) == ("running", None)
    kinds = [one.kind for one in facts.incidents]
    assert kinds == ["crash", "hang in computation", "planned restart"]
    assert "exit code" not in facts.incidents[-1].outcome


def test_a_drained_node_that_ends_during_a_restart_does_not_split_its_incident() -> None:
    made = begun()
    drain(made, 200.0)
    made.crash(204.002, 700, 1)  # the node ends between this crash and the start of the ranks
    facts = run_facts(made.raw())
    assert [one.kind for one in facts.incidents][2:] == ["planned restart", "crash"]


def test_the_history_is_kept_if_a_drained_node_comes_back() -> None:
    made = begun()
    drain(made, 200.0)
    join(made, 210.0, "node3")
    facts = run_facts(made.raw(), is_alive=True)
    assert (facts.state, facts.launches, facts.left_out) == ("running", 1, 0)
    kinds = [one.kind for one in facts.incidents]
    assert kinds == ["crash", "hang in computation", "planned restart"]
    made.end(300.0)
    assert run_facts(made.raw()).state == "finished"


def test_a_rejected_node_does_not_end_the_run_of_the_others() -> None:
    made = begun()
    for t in (200.0, 230.0):
        join(made, t, "node4")
        end(made, t + 1.0, "node4", 2)
        made.pulse(t + 9.0, 900)
    facts = run_facts(made.raw(), is_alive=True)
    assert (facts.state, facts.launches, facts.left_out) == ("running", 1, 0)
    assert [one.kind for one in facts.incidents] == ["crash", "hang in computation"]


def test_a_lost_node_without_an_end_does_not_join_two_runs() -> None:
    made = begun()
    made.put(200.0, "node_lost", node_id="node3", text="node node3 is lost", was_member=True)
    for node in ("node0", "node1", "node2"):
        end(made, 210.0, node, 78)
    again = MadeJournal(ranks=8, nodes=4)
    again.begin()
    again.pulse(60.0, 156)
    made.entries += later(again, 1000.0)
    facts = run_facts(made.raw(), is_alive=True)
    assert (facts.state, facts.left_out, facts.incidents) == ("running", 1, ())


def test_the_journal_of_a_drained_node_alone_has_no_end() -> None:
    made = begun()
    drain(made, 200.0)
    made.entries = [one for one in made.entries if one["node"] == "node3"]
    assert run_facts(made.raw()).state == "no end in the journal"


def test_the_history_is_kept_if_a_node_finds_the_run_finished() -> None:
    made = begun()
    made.end(300.0)
    join(made, 400.0, "node3")
    end(made, 401.0, "node3", 0, run_continues=True)
    facts = run_facts(made.raw())
    assert (facts.state, facts.exit_code, facts.left_out) == ("finished", 0, 0)
    assert [one.kind for one in facts.incidents] == ["crash", "hang in computation"]


def test_a_journal_of_nothing_but_the_end_of_a_drained_node_is_shown() -> None:
    made = MadeJournal()
    end(made, 1.0, "node1", 143, run_continues=True)
    assert run_facts(made.raw()).exit_code == 143
