"""Lines of the journal are JSON whatever is in them."""

import json
import math
from pathlib import Path

from ftrun.journal import Journal, read_journal


def test_what_is_no_number_is_a_word(tmp_path: Path) -> None:
    journal = Journal(tmp_path, who="agent")
    journal.write("Pulse", loss=math.nan, ranks=[[0, math.inf]], verdict={"at": (1.5, -math.inf)})
    journal.write("Pulse", loss=1.5)
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    for line in lines:
        json.loads(line, parse_constant=refuse)
    first, second = read_journal(tmp_path)
    assert first["loss"] == "nan"
    assert first["ranks"] == [[0, "inf"]]
    assert first["verdict"] == {"at": [1.5, "-inf"]}
    assert second["loss"] == 1.5
