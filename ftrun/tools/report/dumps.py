"""Dumps of torch's flight recorders that belong to an incident, in one folder for its analyzer."""

import math
import shlex
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ftrun.tools.report.facts import IncidentFacts


def collect_dumps(folder: Path, incident: IncidentFacts) -> str:
    """Copy the dumps of all nodes to `incident-0003/fr`; return the command that analyses them.

    Empty if there are none. An earlier incident of the same generation has older files.
    """
    found = folder / f"incident-{incident.number:04d}" / "fr"
    end_t_s = incident.began_t_s + (incident.recovered_s or math.inf)
    with suppress(OSError):
        for dump in _dumps(folder, incident.generation or 0):
            if incident.began_t_s <= dump.stat().st_mtime <= end_t_s:
                found.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(dump, found / dump.name)
    if not found.is_dir():
        return ""
    return shlex.join(["torchfrtrace", str(found), "-p", "rank_"])


def _dumps(folder: Path, generation: int) -> Iterator[Path]:
    for logs in (folder, *folder.iterdir()):
        yield from (logs / "fr" / str(generation)).glob("rank_*")
