"""`ftrun logs --incident` knows the incidents that `ftrun report` shows."""

from pathlib import Path

import pytest

from ftrun.errors import UsageError
from ftrun.tools.logs.command import LogRequest, _choice
from ftrun.tools.logs.follow import read_lines
from ftrun.tools.report.command import raw_lines
from ftrun.tools.report.run import run_facts

JOURNALS = Path(__file__).parent / "journals"


@pytest.mark.parametrize("path", sorted(JOURNALS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_incidents_are_those_of_the_report(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "journal.jsonl").write_bytes(path.read_bytes())
    lines = read_lines(tmp_path)
    incidents = run_facts(raw_lines(tmp_path)).incidents
    for one in incidents:
        choice = _choice(LogRequest(incident=str(one.number)), lines, tmp_path)
        assert choice.generation == one.generation
        assert choice.ranks is None or not one.culprits or choice.ranks == set(one.culprits)
        assert one.sentence in capsys.readouterr().err
    if incidents:
        last = _choice(LogRequest(incident="last"), lines, tmp_path)
        assert last.generation == incidents[-1].generation
    with pytest.raises(UsageError, match="incident"):
        _choice(LogRequest(incident="9999"), lines, tmp_path)
