"""Log lines are complete, whatever a rank writes and however its file grows."""

import os
from pathlib import Path

import pytest
from made_journals import START_S, MadeJournal

from ftrun.errors import UsageError
from ftrun.events import Record
from ftrun.records.decode import JournalLine
from ftrun.records.recovery import GenerationStartedRecord
from ftrun.records.run import RunEndedRecord, RunStarted
from ftrun.tools.logs.files import log_files, parse_ranks
from ftrun.tools.logs.follow import (
    MAX_LINE_BYTES,
    LineSplitter,
    LogFilter,
    LogReader,
    LogTailer,
    lines_of,
    shown,
    tail_offset,
)
from ftrun.tools.report.journal import Line


def test_a_line_is_shown_when_it_is_whole() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"one\ntw") == ["one"]
    assert splitter.feed(b"o\n\nthree") == ["two", ""]
    assert splitter.rest() == ["three"]
    assert splitter.rest() == []


def test_of_a_progress_bar_the_last_state_is_shown() -> None:
    assert LineSplitter().feed(b" 10%\r 50%\r100%\n") == ["100%"]
    assert LineSplitter().feed(b"windows\r\n") == ["windows"]


def test_a_line_without_end_is_given_in_parts_and_not_kept_for_ever() -> None:
    splitter = LineSplitter()
    parts = splitter.feed(b"x" * (2 * MAX_LINE_BYTES + 5))
    assert [len(part) for part in parts] == [MAX_LINE_BYTES] * 2
    assert splitter.rest() == ["xxxxx"]
    bar = LineSplitter()
    assert bar.feed(b"".join(b"%d%% of it\r" % n for n in range(100_000)) + b"done") == []
    assert bar.rest() == ["done"]


def test_colour_stays_and_ends_with_its_line_and_nothing_else_gets_through() -> None:
    assert shown(b"\x1b[31mred") == "\x1b[31mred\x1b[0m"
    assert shown(b"a\x1b[2Jb\x1b]0;title\x07c\x08d") == "ab0;titlecd"
    assert shown(b"\xff\xfe") == "\N{REPLACEMENT CHARACTER}" * 2


def test_reader_follows_growth_and_restarts_where_the_file_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_text("a\nb\nc\n")
    reader = LogReader(path, offset=tail_offset(path, 1))
    assert reader.grown() == ["c"]
    with path.open("a") as file:
        file.write("d\nhalf")
    assert reader.grown() == ["d"]
    path.write_text("e\n")
    assert reader.grown() == ["halfe"]
    path.unlink()
    assert reader.ended() == []


def test_lines_written_while_the_last_lines_are_read_are_not_among_them(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_text("a\nb\nc\n")
    lines = lines_of(path, last=2)
    first = next(lines)
    with path.open("a") as file:
        file.write("d\n")
    assert [line for _, line in [first, *lines]] == ["b", "c"]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 99])
@pytest.mark.parametrize("text", ["a\nb\nc\n", "a\nb\nc", "a\n" * 100_000, ""])
def test_last_lines(tmp_path: Path, text: str, count: int) -> None:
    path = tmp_path / "stdout.log"
    path.write_text(text)
    wanted = text.splitlines()[-count:] if count else []
    assert [line for _, line in lines_of(path, last=count)] == wanted
    parts = [part for part, _ in lines_of(path, last=None)]
    assert parts == sorted(parts)


def test_ranks_as_they_are_typed() -> None:
    assert parse_ranks("3") == {3}
    assert parse_ranks("0-2, 7") == {0, 1, 2, 7}
    for wrong in ("", "a", "-1", "3-", "5-2", "0,3-1", "1-99999999", "1;2"):
        with pytest.raises(UsageError):
            parse_ranks(wrong)


def line(t_s: float, record: Record, node: str = "") -> Line:
    return JournalLine(t_s, node, t_s, record)


def started(t_s: float, node: str, generation: int, *ranks: int) -> Line:
    return line(t_s, GenerationStartedRecord("", generation, None, (1, 2), ranks), node)


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x\n")


def test_files_of_several_nodes_have_the_ranks_of_their_generation(tmp_path: Path) -> None:
    for node in ("n0", "n1"):
        make(tmp_path, f"{node}/workers/r_x/attempt_0/0/stdout.log",
             f"{node}/workers/r_x/attempt_0/1/stderr.log")  # fmt: skip
    make(tmp_path, "n1/workers/r_x/attempt_1/0/stdout.log", "n1/workers/r_x/attempt_1/0/error.json")
    lines = [
        *(line(1.0, RunStarted("r", "", "", f"/gone/{node}"), node) for node in ("n0", "n1")),
        started(2.0, "n0", 0, 0, 1),
        started(2.0, "n1", 0, 2, 3),
        started(9.0, "n1", 1, 0, 1),
    ]
    found = [(one.prefix, one.generation, one.path.name) for one in log_files(tmp_path, lines)]
    assert found == [
        ("n0:0", 0, "stdout.log"),
        ("n0:1", 0, "stderr.log"),
        ("n1:2", 0, "stdout.log"),
        ("n1:3", 0, "stderr.log"),
        ("n1:0", 1, "stdout.log"),
    ]


def test_other_runs_in_the_same_folder_are_not_ours(tmp_path: Path) -> None:
    for launch in ("r_ab1_defg", "r_b_ab1_defg", "r_b_c_ab1_defg", "other_ab1_defg"):
        make(tmp_path, f"logs/{launch}/attempt_0/0/stdout.log")
    lines = [line(1.0, RunStarted("r", "", "", str(tmp_path / "logs")))]
    (found,) = log_files(tmp_path, lines)
    assert "r_ab1_defg" in str(found.path)
    assert found.prefix == "0"
    lines = [line(1.0, RunStarted("r", "", "", str(tmp_path / "logs"), "r_b"))]
    (found,) = log_files(tmp_path, lines)
    assert "r_b_ab1_defg" in str(found.path)
    lines = [line(1.0, RunStarted("gone", "", "", str(tmp_path / "logs")))]
    assert not log_files(tmp_path, lines)


def generations(folder: Path, *numbers: int, t_s: float) -> None:
    """The files of one launch of a node with one rank, which begins at this time."""
    for number in numbers:
        make(folder, f"attempt_{number}/0/stdout.log")
        os.utime(folder / f"attempt_{number}", (t_s + number, t_s + number))


def two_nodes(*ended: Line) -> list[Line]:
    """Lines of a launch at 100 s; where it ends, another one begins at 200 s."""
    begun = [
        line(t_s, RunStarted("r", "", "", ""), node)
        for t_s in (100.0, 200.0)[: 1 + bool(ended)]
        for node in ("n0", "n1")
    ]
    return sorted([*begun, *ended], key=lambda one: one.t_s)


def test_a_node_whose_agent_was_restarted_is_in_the_generation_of_the_others(
    tmp_path: Path,
) -> None:
    generations(tmp_path / "n0/workers/r_x", 0, 1, 2, t_s=101.0)
    generations(tmp_path / "n0/workers/r_y", 3, t_s=110.0)
    generations(tmp_path / "n1/workers/r_z", 0, 1, 2, 3, t_s=101.0)
    found = log_files(tmp_path, two_nodes())
    assert [(one.era, one.node) for one in found] == [
        ((0, number), node) for number in range(4) for node in ("n0", "n1")
    ]


def test_a_restarted_agent_does_not_close_the_files_of_the_other_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = MadeJournal(ranks=2, nodes=2)
    made.begin()
    for number in range(1, 4):
        made.generation = number
        made.start(10.0 * number, "restarted", None)
    for one in made.entries:
        if one["kind"] == "generation_started":
            one["ranks"] = made.ranks_of(one["node"])
    (tmp_path / "journal.jsonl").write_bytes(b"".join(made.raw()))
    generations(tmp_path / "node0/workers/r_x", 0, 1, 2, t_s=START_S)
    generations(tmp_path / "node1/workers/r_z", 0, 1, 2, 3, t_s=START_S)
    tailer = LogTailer(tmp_path, LogFilter())
    generations(tmp_path / "node0/workers/r_y", 3, t_s=START_S + 40.0)
    tailer.list_files()
    with (tmp_path / "node1/workers/r_z/attempt_3/0/stdout.log").open("a") as file:
        file.write("later\n")
    tailer.print_grown()
    found = capsys.readouterr().out.splitlines()
    assert sorted(found) == ["node0:0 | x", "node1:1 | later", "node1:1 | x"]


def test_a_node_that_is_new_in_a_later_launch_is_in_the_launch_of_the_others(
    tmp_path: Path,
) -> None:
    generations(tmp_path / "n0/workers/r_x", 0, 1, t_s=101.0)
    generations(tmp_path / "n0/workers/r_y", 0, t_s=201.0)
    generations(tmp_path / "n1/workers/r_z", 0, t_s=201.0)
    ended = [line(150.0, RunEndedRecord(143), node) for node in ("n0", "n1")]
    found = log_files(tmp_path, two_nodes(*ended))
    assert [(one.era, one.node) for one in found] == [
        ((0, 0), "n0"),
        ((0, 1), "n0"),
        ((1, 0), "n0"),
        ((1, 0), "n1"),
    ]


def test_a_launch_without_an_end_is_not_mixed_with_the_next_one(tmp_path: Path) -> None:
    generations(tmp_path / "workers/r_x", 0, 1, t_s=101.0)
    generations(tmp_path / "workers/r_y", 0, t_s=201.0)
    lines = [line(t_s, RunStarted("r", "", "", "")) for t_s in (100.0, 200.0)]
    assert [one.era for one in log_files(tmp_path, lines)] == [(0, 0), (0, 1), (1, 0)]
