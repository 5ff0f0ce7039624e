"""A short part of scripts/soak.py, and its counters."""

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from bench_common import ROOT
from soak_kills import KINDS
from soak_run import TrainingNotes
from soak_training import deck, steps_for, summary
from virtual_cluster import available

KILLS = 8


def test_a_deck_has_each_kind_equally_often_and_follows_its_seed() -> None:
    found = deck(KINDS, 100, random.Random("7-0"))
    assert set(Counter(found).values()) == {12, 13}
    assert found == deck(KINDS, 100, random.Random("7-0"))
    assert found != deck(KINDS, 100, random.Random("7-1"))
    assert steps_for(101) % 10 == 0


def test_notes_report_what_was_restored_and_repeated(tmp_path: Path) -> None:
    paths = [tmp_path / f"rank{rank}.jsonl" for rank in range(2)]
    notes = TrainingNotes(paths)

    def note(rank: int, kind: str, generation: int, **fields: int) -> None:
        line = {"ns": 1, "kind": kind, "generation": generation, "node": "node0", **fields}
        with paths[rank].open("a") as file:
            file.write(json.dumps(line) + "\n")
        notes.read()

    assert notes.done() == 0
    for rank in range(2):
        note(rank, "attached", 0, step=0)
        note(rank, "step", 0, step=0, committed=0, sealed=0)
        note(rank, "step", 0, step=1, committed=1, sealed=1)
    note(0, "step", 0, step=2, committed=2, sealed=2)
    assert (notes.done(), notes.committed, notes.sealed) == (2, 2, 1)
    for rank in range(2):
        note(rank, "attached", 3, step=1)
    assert notes.generations == [0, 3]
    assert (notes.restored(3), notes.done(before=3), notes.done()) == ([1, 1], 2, 2)
    note(1, "step", 0, step=2)
    assert "after generation 3 had begun" in notes.problems[0]


def test_trainings_are_summed_up() -> None:
    one = {"kills": 2, "by_kind": {"smp": 2}, "steps_repeated_max": 3, "equal": True}
    one |= {"lost_more_than_promised": 0, "seconds": 10.0, "effective_training_time_ratio": 0.5}
    other = {**one, "by_kind": {"rank": 2}, "equal": False, "seconds": 30.0}
    assert summary([one, other]) == {
        "kills": 4,
        "by_kind": {"rank": 2, "smp": 2},
        "steps_repeated_max": 3,
        "lost_more_than_promised": 0,
        "equal": False,
        "effective_training_time_ratio": 0.5,
    }


@pytest.mark.full
@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(bool(available()), reason=f"needs namespaces: {available()}")
def test_a_short_soak_is_equal_and_continues_where_it_ended(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"

    def soak(kills: int) -> dict[str, object]:
        words = ["--kills", kills, "--training-kills", KILLS, "--job", "fsdp2", "--json", file]
        command = [sys.executable, ROOT / "scripts" / "soak.py", *words]
        done = subprocess.run(
            [str(word) for word in command], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, object] = json.loads(file.read_text())
        return found

    found = soak(KILLS)
    assert found["by_kind"] == dict.fromkeys(sorted(KINDS), 1)
    assert (found["kills"], found["lost_more_than_promised"], found["equal"]) == (KILLS, 0, True)
    assert soak(KILLS) == found, "all kills were done, and it has made more"
