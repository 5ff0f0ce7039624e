"""`ftrun report` finds the run, writes complete files, and names errors in words."""

import json
import os
import threading
from pathlib import Path

import pytest
from made_journals import long_run

from ftrun.errors import FtrunError, UsageError
from ftrun.tools.report.command import LAST_LINES, last_words, report

JOURNALS = Path(__file__).parent / "journals"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two runs, the second of which was written to last."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for age_s, name in ((100, "one-node-two-kills"), (0, "node-without-power")):
        folder = tmp_path / "ftrun-logs" / name
        folder.mkdir(parents=True)
        journal = folder / "journal.jsonl"
        journal.write_bytes((JOURNALS / f"{name}.jsonl").read_bytes())
        changed = journal.stat().st_mtime - age_s
        os.utime(journal, (changed, changed))
    return tmp_path


def test_without_a_word_it_is_the_run_that_was_written_to_last(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(None)
    folder = here / "ftrun-logs" / "node-without-power"
    reported = capsys.readouterr().out.splitlines()
    assert reported[0] == f"{folder / 'report.html'} and 1 of its incidents in the same folder"
    assert reported[1].startswith("FINISHED  step 160")
    page = (folder / "report.html").read_text()
    assert 'href="incident-0001.html"' in page
    assert 'href="report.html"' in (folder / "incident-0001.html").read_text()
    assert sorted(one.name for one in folder.iterdir()) == [
        "incident-0001.html",
        "journal.jsonl",
        "report.html",
    ]


def test_one_incident_of_a_run_that_is_named(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report("2", run="one-node-two-kills")
    path, sentence = capsys.readouterr().out.splitlines()
    assert path.endswith("one-node-two-kills/incident-0002.html")
    assert sentence.startswith("rank 1 was killed by SIGSEGV at step 583;")
    assert 'href="report' not in Path(path).read_text()


def test_a_folder_elsewhere_and_a_file_of_ones_own(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = here / "page.html"
    report("last", run=str(here / "ftrun-logs" / "one-node-two-kills"), out=str(out))
    assert "incident 2" in out.read_text()
    assert capsys.readouterr().out.startswith(f"{out}\n")


def test_a_page_on_stdout_has_nothing_next_to_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(None, out="-")
    page = capsys.readouterr().out
    assert page.startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")


def test_json_holds_the_same_facts(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(None, run="one-node-two-kills", as_json=True)
    run = json.loads(capsys.readouterr().out)
    assert run["verdict"].startswith("FINISHED  step 700")
    assert run["incidents"][0]["culprits"] == [1]
    report("1", run="one-node-two-kills", as_json=True)
    assert json.loads(capsys.readouterr().out) == {
        **run["incidents"][0],
        "log_title": "No file holds the output of rank 1: its streams went to the terminal. "
        "Start with --redirects 3 to have it here",
    }
    assert not list(here.glob("ftrun-logs/*/*.html"))


def test_dumps_of_an_incident_are_collected_for_the_analyzer(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = here / "ftrun-logs" / "one-node-two-kills"
    report("1", run="one-node-two-kills", as_json=True)
    first = json.loads(capsys.readouterr().out)
    assert first["dumps"] == ""
    for below, name, age_s in (
        ("fr/0", "rank_0", 0.01), ("n2/fr/0", "rank_1", 0.01), ("fr/0", "rank_2", -9.0),
        ("fr/7", "rank_3", 0.01),
    ):  # fmt: skip
        dumps = logs / below
        dumps.mkdir(parents=True, exist_ok=True)
        (dumps / name).write_text(name)
        os.utime(dumps / name, times=(0, first["began_t_s"] + age_s))
    report("1", run="one-node-two-kills")
    found = logs / "incident-0001" / "fr"
    assert capsys.readouterr().out.endswith(
        f"The ranks' flight recorders: torchfrtrace {found} -p rank_ --allow-incomplete-ranks\n"
    )
    assert {one.name: one.read_text() for one in found.iterdir()} == {
        "rank_0": "rank_0",
        "rank_1": "rank_1",
        "rank_3": "rank_3",
    }


@pytest.mark.parametrize("name", ["nobody", "../../etc", "\x00", "a" * 5000, "", "ftrun-logs"])
def test_a_run_that_is_not_there(here: Path, name: str) -> None:
    with pytest.raises((UsageError, FtrunError), match=r"no journal of run"):
        report(None, run=name)


def test_nowhere_a_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="there is no ftrun-logs/"):
        report(None)


def test_a_folder_that_cannot_be_written(here: Path) -> None:
    with pytest.raises(FtrunError, match=r"cannot be written: .* Name another file with --out"):
        report(None, out=str(here / "nowhere" / "page.html"))


def test_only_nodes_have_a_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = long_run()
    for node in made.nodes:
        folder = tmp_path / "ftrun-logs" / "big-1" / node
        folder.mkdir(parents=True)
        lines = [json.dumps(one) for one in made.entries if one["node"] == node]
        (folder / "journal.jsonl").write_text("\n".join(lines))
    report("1")
    assert "rank 3 on node0" in (tmp_path / "ftrun-logs/big-1/incident-0001.html").read_text()


def test_last_words_of_a_rank(tmp_path: Path) -> None:
    place = tmp_path / "node1" / "workers" / "run_x" / "attempt_3" / "1"
    place.mkdir(parents=True)
    lines = [f"line {number}" for number in range(100)]
    (place / "stdout.log").write_bytes(
        "\n".join(lines).encode() + b"\n10 %\r20 %\r30 %\n\xff\x1b[1m"
    )
    (place / "stderr.log").write_bytes(b"")
    title, words = last_words(tmp_path, rank=5, node="node1", ranks_here=(4, 5), generation=3)
    assert title.startswith("Rank 5, generation 3: ")
    assert words[-2:] == ("30 %", "\ufffd\\x1b[1m")
    assert "line 99" in words
    assert len(words) <= LAST_LINES + 1


def test_a_log_of_many_megabytes_is_read_from_its_end(tmp_path: Path) -> None:
    place = tmp_path / "workers" / "run_x" / "attempt_0" / "0"
    place.mkdir(parents=True)
    (place / "stderr.log").write_bytes(b"x" * 3_000_000 + b"\nthe end\n")
    _, words = last_words(tmp_path, rank=0, node="", ranks_here=(0,), generation=0)
    assert words[-1] == "the end"
    assert sum(len(one) for one in words) < 2000


def test_a_rank_that_wrote_nothing_and_a_folder_of_ones_own(tmp_path: Path) -> None:
    place = tmp_path / "elsewhere" / "run_x" / "attempt_0" / "0"
    place.mkdir(parents=True)
    (place / "stdout.log").touch()

    def words() -> tuple[str, tuple[str, ...]]:
        logs = str(tmp_path / "elsewhere")
        return last_words(tmp_path, rank=0, node="", ranks_here=(), generation=0, logs=logs)

    assert words() == (f"Rank 0 had written nothing to {place}", ())
    (place / "stdout.log").write_text("hello")
    assert words()[1] == ("hello",)


def test_links_and_fifos_stay_what_they_are(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "old.html").write_text("old")
    (here / "link.html").symlink_to("old.html")
    (here / "new.html").symlink_to("not-yet.html")
    for link, target in (("link.html", "old.html"), ("new.html", "not-yet.html")):
        report(None, out=link)
        assert (here / link).is_symlink()
        assert "</html>" in (here / target).read_text()
    os.mkfifo(here / "pipe")
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append((here / "pipe").read_text()))
    reader.start()
    try:
        report(None, out="pipe")
    finally:
        os.close(os.open(here / "pipe", os.O_RDWR))  # no reader waits forever
        reader.join()
    assert (here / "pipe").is_fifo()
    assert "</html>" in got[0]
    with pytest.raises(FtrunError, match="cannot be written"):
        report(None, out=str(here))
    capsys.readouterr()
