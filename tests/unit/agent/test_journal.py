"""Lines of the journal are JSON for all values, and are read as they were written."""

import json
import math
import resource
from pathlib import Path

import msgspec
import pytest

from ftrun.events import ExitKind, Progress, WorkerExit, WorkersExited
from ftrun.ids import Rank, Step, version
from ftrun.journal import Journal
from ftrun.records.decode import decode, kinds
from ftrun.records.recovery import GenerationStartedRecord
from ftrun.records.run import ErrorRecord, ProgressRecord

GOLDEN = Path(__file__).parents[2] / "contract" / "journal_kinds.json"


def test_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write(ProgressRecord(1, 1, loss=math.nan, ranks=((0, 1, math.inf),)))
    journal.write(ProgressRecord(2, 2, loss=1.5))
    lines = (tmp_path / "journal.jsonl").read_bytes().splitlines()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    for line in lines:
        json.loads(line, parse_constant=refuse)
    first, second = (found.record for line in lines if (found := decode(line)) is not None)
    assert first == ProgressRecord(1, 1, loss=None, ranks=((0, 1, None),))
    assert second == ProgressRecord(2, 2, loss=1.5)


@pytest.mark.parametrize("text", ["a\ud800b", "line\u2028line", "\0\x1b[1m"])
def test_any_text_is_one_line(tmp_path: Path, text: str) -> None:
    journal = Journal(tmp_path, node="n\u00e9")
    journal.keep_copies()
    journal.write(ErrorRecord(text, "OSError"))
    (line,) = (tmp_path / "journal.jsonl").read_bytes().splitlines()
    assert journal.take_copies() == [line.decode()]
    found = decode(line)
    assert found is not None
    assert (found.node, found.record) == (
        "n\u00e9",
        ErrorRecord(text.replace("\ud800", "?"), "OSError"),
    )


def test_a_full_disk_costs_no_line_after_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        while journal.dropped < 3:
            journal.write(ErrorRecord("x" * 50, ""))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    journal.write(ErrorRecord("there is room again", ""))
    *_, torn, last = (tmp_path / "journal.jsonl").read_bytes().splitlines()
    with pytest.raises(ValueError, match="line 1"):
        json.loads(torn)
    assert "there is room again" in last.decode()
    assert decode(last) is not None


def test_a_text_of_another_class_is_a_text(tmp_path: Path) -> None:
    """Like `torch.__version__`, whose class is derived from str."""

    class Text(str):
        __slots__ = ()

    Journal(tmp_path).write(ErrorRecord(Text("2.13.0"), "OSError"))
    found = decode((tmp_path / "journal.jsonl").read_bytes())
    assert found is not None
    assert found.record == ErrorRecord("2.13.0", "OSError")


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    end = WorkerExit(Rank(1), ExitKind.SIGNAL, -9, "rank 1 was killed", detail="x", fingerprint="f")
    wrote = [
        WorkersExited((end,), Progress(Step(3), 2, attached=True)),
        GenerationStartedRecord("rank 1 was killed", 2, version(1, 3), (7, 8), (0, 1)),
    ]
    seen: list[object] = []
    journal = Journal(tmp_path)
    journal.watch(seen.append)
    for record in wrote:
        journal.write(record)
    lines = (tmp_path / "journal.jsonl").read_bytes().splitlines()
    found = [line.record for raw in lines if (line := decode(raw)) is not None]
    assert found == wrote == seen


@pytest.mark.parametrize("line", [
    b"", b"[]", b"[" * 100_000, b'{"time": 1, "monotonic_s": 1, "kind": "tomorrow"}',
    b'{"time": 1, "kind": "internal_error", "text": "no monotonic_s"}',
    b'{"time": 1, "monotonic_s": 1, "kind": "internal_error"}',
    b'{"time": 1, "monotonic_s": 1, "kind": "internal_error", "text": 1}',
    b'{"time": 1, "monotonic_s": 1, "kind": "progress", "step": 1e30, "steps_here": 1}',
    b'{"time": 1, "monotonic_s": 1, "kind": "internal_error", "text": "to',
    b'{"time": 1, "monotonic_s": 1, "kind": "internal_error", "text": "\xff"}',
])  # fmt: skip
def test_other_lines_are_skipped(line: bytes) -> None:
    assert decode(line) is None


def test_every_kind_and_its_fields_are_as_recorded() -> None:
    """A changed kind or field requires a new version of the journal."""
    found = {
        kind: [field.encode_name for field in msgspec.structs.fields(record)]
        for kind, record in sorted(kinds().items())
    }
    assert found == json.loads(GOLDEN.read_text())
