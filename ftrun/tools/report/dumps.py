"""Dumps of torch's flight recorders that belong to an incident, in one folder for its analyzer."""

import math
import shlex
import shutil
from contextlib import suppress
from pathlib import Path

from ftrun.tools.report.facts import IncidentFacts


def collect_dumps(folder: Path, incident: IncidentFacts) -> str:
    """Copy the dumps of all nodes to `incident-0003/fr`; return the command that analyses them.

    Empty if there are none. They belong to the incident by their times, because an incident without
    a restart has no generation.
    """
    found = folder / f"incident-{incident.number:04d}" / "fr"
    end_t_s = incident.began_t_s + (incident.recovered_s or math.inf)
    dumps: list[tuple[float, Path]] = []
    with suppress(OSError):
        for logs in (folder, *folder.iterdir()):
            dumps += [(path.stat().st_mtime, path) for path in logs.glob("fr/*/rank_*")]
    for at_t_s, dump in sorted(dumps):
        if incident.began_t_s <= at_t_s <= end_t_s:
            with suppress(OSError):
                found.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(dump, found / dump.name)
    if not found.is_dir():
        return ""
    return shlex.join(["torchfrtrace", str(found), "-p", "rank_"])
