"""One incident as values: what happened, who it was, what says so, and what it cost.

Runs in:  cli. Pure.
Takes in: the lines of one incident, and what the whole run tells of ranks, steps and start-up.
Gives:    `IncidentFacts`.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from ftrun.cli.screen.text import clean, duration, joined, numbers, texts, whole, with_commas
from ftrun.tools.report.background import RunBackground, homes_of
from ftrun.tools.report.facts import REPORTED, IncidentFacts, TimelineEvent
from ftrun.tools.report.incident.grouping import IncidentLines, failed
from ftrun.tools.report.incident.ranks import rows_of, slow_kind
from ftrun.tools.report.incident.report_evidence import delays_of, evidence_of, stacks_of
from ftrun.tools.report.incident.report_sentence import sentence_of
from ftrun.tools.report.incident.timeline import IncidentTimes, bars_of, moments_of
from ftrun.tools.report.journal import JournalLine
from ftrun.tools.report.report_cost import cost_of

_STEP = re.compile(r"step[ =]([\d,]{1,20})")
_LOST_NODE = re.compile(r"node (\S{1,100}) is lost")
_MAX_EVENTS = 80


def incident_of(case: IncidentLines, background: RunBackground) -> IncidentFacts:
    """Everything a page about this incident says."""
    moments = moments_of(case)
    judged = case.last("Verdict")
    verdict = judged.part("verdict") if judged is not None else {}
    closed = case.first("IncidentClosed")
    ended = _first_ended(case, moments)
    culprits = numbers(verdict.get("culprits")) or tuple(ended)
    victims = numbers(verdict.get("victims"))
    nodes = texts(verdict.get("nodes")) or _lost_nodes(case)
    step, restored = _step(case), _restored(case)
    told = verdict.get("kind") or (closed.text("verdict_kind") if closed is not None else "")
    kind = clean(str(told or ""), 60) or _kind(case, ended)
    world = background.world or culprits
    start = case.first("StartGeneration")
    homes = homes_of(start.t_s if start is not None else math.inf, background, nodes)
    on = dict.fromkeys(homes[one][0] for one in culprits if one in homes)
    nodes = nodes or tuple(node for node in on if node)
    if not culprits and kind == "node lost":
        culprits = tuple(rank for rank, (node, _) in homes.items() if node in nodes)
    steps_lost = closed.whole("steps_lost") if closed is not None else None
    if steps_lost is None:
        steps_lost = _steps_lost(step, restored, case)
    facts = IncidentFacts(
        number=case.number or 0,
        kind="planned restart" if case.is_planned else kind,
        sentence="",
        began_t_s=moments.began,
        noticed_s=moments.noticed - moments.began,
        recovered_s=_downtime_s(case, moments),
        outcome=_outcome(case, moments, kind),
        is_planned=case.is_planned,
        is_open=moments.recovered is None and closed is None and case.first("EndRun") is None,
        sure=clean(str(verdict.get("sure") or ""), 20) or _sure(case, ended),
        culprits=culprits,
        nodes=nodes,
        victims=victims,
        world_size=len(background.world) or None,
        generation=_generation(case),
        step=step,
        steps_lost=steps_lost,
        restored=restored, repeated=_repeated(case),
        action=_action(case),
        verified=_verified(closed),
        bars=tuple(bars_of(case, moments)),
        rows=tuple(rows_of(case, moments, world=world, homes=homes,
                           culprits=culprits, victims=victims)),
        stacks=tuple(stacks_of(judged, culprits, victims, case)),
        delays=delays_of(case),
        evidence=texts(verdict.get("evidence")) or tuple(evidence_of(case, moments.acted)),
        against=texts(verdict.get("against")),
        cost=cost_of(moments, step, steps_lost, background, kind=kind),
        events=tuple(_event(line) for line in case.lines[:_MAX_EVENTS]),
        injected=_injected(case.injected),
        protected_s=_protected(moments, case, background),
        paused_s=sum(bar.took_s for bar in bars_of(case, moments) if bar.name == "PAUSED"),
    )  # fmt: skip
    if facts.is_reported and max((bar.took_s for bar in facts.bars), default=0.0) < 1e-3:
        facts = replace(facts, bars=(), rows=())
    return sentence_of(facts, case, clean(str(verdict.get("text") or ""), 600))


def _downtime_s(case: IncidentLines, moments: IncidentTimes) -> float | None:
    """From the fault to the next step of every rank, as the lead measured it."""
    line = case.last("Downtime")
    told = line.number("total_s") if line is not None else None
    if told is not None or moments.recovered is None:
        return told
    return moments.recovered - moments.began


def _first_ended(case: IncidentLines, moments: IncidentTimes) -> list[int]:
    """Ranks that ended by themselves."""
    for line in case.of("WorkersExited"):
        if moments.acted is None or line.t_s <= moments.acted:
            exits = [one for one in line.parts("exits") if one.get("kind") != "finished"]
            return [rank for one in exits if (rank := whole(one.get("rank"))) is not None]
    return []


def _lost_nodes(case: IncidentLines) -> tuple[str, ...]:
    seen = (_LOST_NODE.search(line.text("text")) for line in case.of("NodeLost"))
    return tuple(dict.fromkeys(one[1] for one in seen if one))


def _kind(case: IncidentLines, ended: Sequence[int]) -> str:
    if case.first("NodeLost") is not None:
        return "node lost"
    if case.first("LeadLost") is not None and not ended:
        return "lead lost"
    if case.first("adopted") is not None and not ended:
        return "agent lost"
    if any("lead is lost" in line.text("text") for line in case.of("Ballot")):
        return "lead lost"
    kinds = {one.get("kind") for line in case.of("WorkersExited") for one in line.parts("exits")}
    if "out of memory" in kinds:
        return "out of memory"
    return "crash" if ended else "restart"


def _protected(
    moments: IncidentTimes, case: IncidentLines, background: RunBackground
) -> float | None:
    line = case.last("Recovered")
    generation = line.whole("generation") if line is not None else None
    if line is None or generation is None or moments.recovered is None:
        return None
    at = (t_s for t_s, of in background.commits if of >= generation and t_s > line.t_s)
    first = next(at, None)
    return None if first is None else first - moments.began


def _injected(fired: JournalLine | None) -> str:
    if fired is None:
        return ""
    rank, node = fired.whole("rank"), fired.text("node", 60)
    where = f" on rank {rank}" if rank is not None else f" on {node}" if node else ""
    step = fired.whole("step")
    return f"{fired.text('fault', 40)}{where}{f' at step {step:,}' if step is not None else ''}"


def _sure(case: IncidentLines, ended: Sequence[int]) -> str:
    lost = case.first("NodeLost")
    if lost is not None and not ended:
        return "likely" if "silent" in lost.text("text") else "certain"
    return "certain" if ended else ""


def _step(case: IncidentLines) -> int | None:
    """The furthest that any rank had come."""
    found = []
    for line in case.lines:
        if line.kind == "WorkersExited":
            progress = line.fields.get("progress")
            if isinstance(progress, dict):
                found.append(whole(progress.get("step")))
            elif isinstance(progress, str) and (seen := _counted_step(progress)):
                found.append(int(seen[1].replace(",", "") or 0))
        elif line.kind == "Verdict":
            found += [whole(view.get("step")) for view in line.parts("ranks")]
        elif line.kind == "Recovered":
            break
    closed = case.last("IncidentClosed")
    if closed is not None and (lost := closed.whole("steps_lost")) is not None:
        restored = closed.whole("restored")
        found.append(None if restored is None else restored + lost)
    return max((one for one in found if one is not None), default=None)


def _counted_step(progress: str) -> re.Match[str] | None:
    """A script that does not attach counts no steps: its 0 says nothing."""
    return None if "attached=False" in progress else _STEP.search(progress)


def _restored(case: IncidentLines) -> str:
    line = case.last("Recovered") or case.last("StartGeneration")
    return with_commas(line.text("restored", 100)) if line is not None else ""


def _steps_lost(step: int | None, restored: str, case: IncidentLines) -> int | None:
    seen = _STEP.search(restored)
    if step is None or case.first("StartGeneration") is None:
        return None
    if seen is None:
        return None  # the script goes on from its own checkpoint, or from its beginning
    return max(step - int(seen[1].replace(",", "") or 0), 0)


def _generation(case: IncidentLines) -> int | None:
    line = case.first("StartGeneration", "Generation", "Ballot")
    found = line.whole("generation") if line is not None else None
    return found - 1 if found else found


def _repeated(case: IncidentLines) -> tuple[str, ...]:
    """The newest word of each node."""
    newest = {line.node: line.text("text", 400) for line in case.of("RepeatedSteps")}
    if len(set(newest.values())) == 1:
        return tuple(newest.values())[:1]
    return tuple(f"{node}: {text}" for node, text in sorted(newest.items()))


def _outcome(case: IncidentLines, moments: IncidentTimes, kind: str) -> str:
    end = case.first("EndRun")
    if end is not None and moments.recovered is None:
        if failed(end):
            return f"the run ended with exit code {end.whole('exit_code')}"
        again = case.last("StartGeneration")
        if again is None or again.t_s < moments.noticed:
            return "the run ended"
        return f"started again after {duration(again.t_s - moments.began)}, and then all ended well"
    closed = case.last("IncidentClosed")
    if moments.recovered is not None:
        return f"training again after {duration(_downtime_s(case, moments) or 0.0)}"
    if closed is not None or slow_kind(kind):
        return REPORTED
    return "not over when the journal ends"


def _action(case: IncidentLines) -> str:
    closed = case.last("IncidentClosed")
    if closed is not None and (listed := texts(closed.fields.get("actions"), most=6)):
        return ", then ".join(dict.fromkeys(listed))[:80]
    if closed is not None and closed.text("action"):
        return closed.text("action", 60)
    done = dict.fromkeys(line.text("action", 60) for line in case.of("Action"))
    if done:
        return joined([one for one in done if one])
    return "kill and respawn" if case.first("StartGeneration") is not None else ""


def _verified(closed: JournalLine | None) -> tuple[str, ...]:
    if closed is None:
        return ()
    verified = closed.part("verified")
    words = []
    if verified.get("progress") is True:
        words.append("progress was made after it")
    elif verified.get("progress") is False:
        words.append("no progress was made after it")
    if loss := clean(str(verified.get("loss") or ""), 40):
        words.append("the loss goes on where it was" if loss == "continuous" else f"loss: {loss}")
    return tuple(words)


def _event(line: JournalLine) -> TimelineEvent:
    known = (line.text(name, 300) for name in ("text", "why", "cause"))
    said = next((one for one in known if one), "")
    if line.kind == "WorkersExited":
        said = "; ".join(clean(str(one.get("text") or ""), 120) for one in line.parts("exits")[:6])
    if line.kind == "Verdict":
        said = clean(str(line.part("verdict").get("text") or ""), 300)
    if line.kind == "Action":
        said = f"{line.text('action', 40)}: {said}"
    if line.kind == "Transition":
        said = f"{line.text('old', 20)} to {line.text('new', 20)}: {said}"
    if line.kind == "Recovered":
        said = f"generation {line.whole('generation')} from {line.text('restored', 60) or 'start'}"
    return TimelineEvent(line.t_s, line.node, line.kind, said)
