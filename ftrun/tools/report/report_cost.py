"""What an incident has cost, and what a restart from a checkpoint would have.

Runs in: cli. Pure.

Rule 1: the comparison uses numbers of this run alone, and says each of them.
"""

from ftrun.cli.screen.text import count, duration
from ftrun.tools.report.background import RunBackground
from ftrun.tools.report.facts import IncidentCost
from ftrun.tools.report.incident.ranks import slow_kind
from ftrun.tools.report.incident.timeline import IncidentTimes

HANGS = (
    "hang in computation",
    "hang in communication",
    "skipped collective",
    "deadlock",
    "frozen",
    "GIL stuck",
    "busy loop",
)


def cost_of(
    moments: IncidentTimes,
    step: int | None,
    steps_lost: int | None,
    background: RunBackground,
    *,
    kind: str,
) -> IncidentCost | None:
    if slow_kind(kind) and moments.recovered is None:
        return None
    stood = None if moments.recovered is None else moments.recovered - moments.began
    step_s, start_s = background.step_s, background.start_s
    redone = None if steps_lost is None or step_s is None else steps_lost * step_s
    before = [one for one in background.checkpoints if one[0] < moments.began]
    from_step = before[-1][1] if before else 0
    how = []
    total: float | None = None
    if start_s is not None:
        what = "to the first step" if background.has_first_step else "until its ranks were started"
        how.append(f"{duration(start_s)} to start again: what this run's own start took, {what}")
    if step is not None:
        again = max(step - from_step, 0)
        whence = f"since the checkpoint of step {from_step:,}" if before else (
            "since step 0, as no checkpoint is on disk")  # fmt: skip
        takes = "" if step_s is None else f", {duration(step_s)} each: {duration(again * step_s)}"
        how.append(f"{count(again, 'step')} {whence}{takes}")
        if start_s is not None and step_s is not None:
            total = start_s + again * step_s + (moments.noticed - moments.began)
    took_s = moments.noticed - moments.began
    noticed = f"{duration(took_s)} to notice it, as it took here"
    if took_s < 1e-3:
        noticed = "no time to notice it, as here"
    if kind in HANGS:
        noticed += (
            ". Without ftrun it lasts until the process group's own timeout, 10 min (NCCL) or 30 "
            "min (gloo) unless it is set; that is not counted"
        )
    how.append(noticed)
    return IncidentCost(stood, redone, len(background.world) or None, total, tuple(how))
