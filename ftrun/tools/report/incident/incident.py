"""One incident as values: what happened, the culprit, the evidence, and the cost."""

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace

from ftrun.cli.screen.text import clean, count, duration, joined, with_commas
from ftrun.events import ExitKind, Record, WorkersExited
from ftrun.ids import Version
from ftrun.monitor.verdicts import Verdict, VerdictKind
from ftrun.records.decode import JournalLine
from ftrun.records.faults import FaultInjected
from ftrun.records.incidents import (
    ActionTaken,
    IncidentClosed,
    LifecycleChanged,
    SuspicionRaised,
    VerdictRecord,
)
from ftrun.records.membership import (
    BallotStarted,
    GenerationChosen,
    LeaderLost,
    NodeLost,
    RanksStayed,
)
from ftrun.records.recovery import (
    DowntimeRecord,
    EndRun,
    GenerationStartedRecord,
    KillWorkers,
    Recovered,
    RepeatedStepsRecord,
)
from ftrun.records.snapshots import MemoryAdopted
from ftrun.tools.report.background import RunBackground, placements_of
from ftrun.tools.report.costs import cost_of
from ftrun.tools.report.facts import REPORTED, IncidentFacts, TimelineEvent
from ftrun.tools.report.incident.grouping import IncidentLines, words_of
from ftrun.tools.report.incident.ranks import (
    delays_of,
    ended_by_themselves,
    evidence_of,
    rows_of,
    slow_kind,
    stacks_of,
)
from ftrun.tools.report.incident.timeline import IncidentTimes, bars_of, moments_of

_MAX_EVENTS = 80
_NO_VERDICT = Verdict(VerdictKind.CRASH, (), "")
"""Used if no line has a verdict; its kind is not shown."""


def incident_of(case: IncidentLines, background: RunBackground) -> IncidentFacts:
    moments = moments_of(case)
    last, closing = case.last(VerdictRecord), case.first(IncidentClosed)
    judged = last.record if last is not None else None
    verdict = judged.verdict if judged is not None else None
    closed = closing.record if closing is not None else None
    ended = _first_ended(case, moments)
    named = verdict or _NO_VERDICT
    culprits, victims = named.culprits or ended, named.victims
    nodes = named.nodes or tuple({line.record.node_id: 0 for line in case.of(NodeLost)})
    step, restored = _step(case), _restored(case)
    kind = _kind(case, verdict, closed, ended)
    world, start = background.world or culprits, case.first(GenerationStartedRecord)
    homes = placements_of(start.t_s if start is not None else math.inf, background, nodes)
    on = dict.fromkeys(homes[one][0] for one in culprits if one in homes)
    nodes = nodes or tuple(node for node in on if node)
    if not culprits and kind == "node lost":
        culprits = tuple(rank for rank, (node, _) in homes.items() if node in nodes)
    steps_lost = closed.steps_lost if closed is not None else None
    if steps_lost is None and step is not None and restored is not None:
        steps_lost = max(step - restored.step, 0)
    facts = IncidentFacts(
        number=case.number or 0,
        kind="planned restart" if case.is_planned else kind,
        sentence="",
        began_t_s=moments.start,
        noticed_s=moments.noticed - moments.start,
        recovered_s=_downtime_s(case, moments),
        outcome=_outcome(case, moments, kind),
        is_planned=case.is_planned,
        is_open=moments.recovered is None and closed is None and case.first(EndRun) is None,
        confidence=verdict.confidence.value if verdict is not None else _confidence(case, ended),
        error_class=clean(named.error_class, 60),
        culprits=culprits,
        nodes=nodes,
        victims=victims,
        world_size=len(background.world) or None,
        generation=_generation(case),
        step=step,
        steps_lost=steps_lost,
        restored=with_commas(str(restored or "")),
        repeated=_repeated(case),
        action=_action(case),
        verified=_verified(closed),
        bars=tuple(bars_of(case, moments)),
        rows=tuple(rows_of(case, moments, world=world, homes=homes,
                           culprits=culprits, victims=victims)),
        stacks=tuple(stacks_of(judged, culprits, victims, case)),
        delays=delays_of(case),
        evidence=named.evidence or tuple(evidence_of(case, moments.acted)),
        counter_evidence=named.counter_evidence,
        cost=cost_of(moments, step, steps_lost, background, kind=kind),
        events=tuple(_event(line) for line in case.lines[:_MAX_EVENTS]),
        injected=_injected(case.injected),
        protected_s=_protected(moments, case, background),
        paused_s=sum(bar.took_s for bar in bars_of(case, moments) if bar.name == "PAUSED"),
    )  # fmt: skip
    if facts.is_reported and max((bar.took_s for bar in facts.bars), default=0.0) < 1e-3:
        facts = replace(facts, bars=(), rows=())
    return sentence_of(facts, case, clean(named.text, 600))


def _downtime_s(case: IncidentLines, moments: IncidentTimes) -> float | None:
    """From the fault to the next step of every rank, as the leader measured it."""
    line = case.last(DowntimeRecord)
    if line is not None:
        return line.record.total_s
    return None if moments.recovered is None else moments.recovered - moments.start


def _first_ended(case: IncidentLines, moments: IncidentTimes) -> tuple[int, ...]:
    """Ranks that ended by themselves, by the first line that names ranks."""
    found = ended_by_themselves(case, moments.acted)
    first = case.first(WorkersExited)
    return tuple(rank for t_s, rank in found if first is not None and t_s == first.t_s)


def _kind(
    case: IncidentLines,
    verdict: Verdict | None,
    closed: IncidentClosed | None,
    ended: Sequence[int],
) -> str:
    if verdict is not None:
        return verdict.kind.value
    if closed is not None:
        return closed.verdict_kind
    if case.first(NodeLost) is not None:
        return "node lost"
    if case.first(LeaderLost) is not None and not ended:
        return "lead lost"
    if case.first(MemoryAdopted) is not None and not ended:
        return "agent lost"
    if any("lead is lost" in line.record.text for line in case.of(BallotStarted)):
        return "lead lost"
    exits = [one for line in case.of(WorkersExited) for one in line.record.exits]
    if any(one.kind is ExitKind.OUT_OF_MEMORY for one in exits):
        return "out of memory"
    return "crash" if ended else "restart"


def _protected(
    moments: IncidentTimes, case: IncidentLines, background: RunBackground
) -> float | None:
    line = case.last(Recovered)
    if line is None or moments.recovered is None:
        return None
    generation = line.record.generation
    at = (t_s for t_s, of in background.commits if of >= generation and t_s > line.t_s)
    first = next(at, None)
    return None if first is None else first - moments.start


def _injected(line: JournalLine[FaultInjected] | None) -> str:
    if line is None:
        return ""
    fault = line.record
    where = f" on rank {fault.rank}" if fault.rank >= 0 else f" on {line.node}" if line.node else ""
    return f"{clean(fault.fault, 40)}{where} at step {fault.step:,}"


def _confidence(case: IncidentLines, ended: Sequence[int]) -> str:
    lost = case.first(NodeLost)
    if lost is not None and not ended:
        return "likely" if "no heartbeat" in lost.record.text else "certain"
    return "certain" if ended else ""


def _step(case: IncidentLines) -> int | None:
    """The furthest step of any rank."""
    found = []
    for line in case.lines:
        match line.record:
            case WorkersExited(progress=progress) if progress.attached:  # else no step is counted
                found.append(int(progress.step))
            case VerdictRecord(ranks=views):
                found += [view.step for view in views]
            case Recovered():
                break
            case _:
                pass
    closed = case.last(IncidentClosed)
    if closed is not None and None not in (closed.record.restored, closed.record.steps_lost):
        found.append((closed.record.restored or 0) + (closed.record.steps_lost or 0))
    return max(found, default=None)


def _restored(case: IncidentLines) -> Version | None:
    """None also if the script resumes from its own checkpoint, or from its beginning."""
    recovered, started = case.last(Recovered), case.last(GenerationStartedRecord)
    if recovered is not None:
        return recovered.record.restored
    return started.record.restored if started is not None else None


def _generation(case: IncidentLines) -> int | None:
    """The generation that failed."""
    for line in case.lines:
        if isinstance(line.record, GenerationStartedRecord | GenerationChosen | BallotStarted):
            return max(line.record.generation - 1, 0)
    return None


def _repeated(case: IncidentLines) -> tuple[str, ...]:
    newest = {
        line.node: clean(line.record.result.text, 400) for line in case.of(RepeatedStepsRecord)
    }
    if len(set(newest.values())) == 1:
        return tuple(newest.values())[:1]
    return tuple(f"{node}: {text}" for node, text in sorted(newest.items()))


def _outcome(case: IncidentLines, moments: IncidentTimes, kind: str) -> str:
    end = case.first(EndRun)
    if end is not None and moments.recovered is None:
        if end.record.exit_code:
            return f"the run ended with exit code {end.record.exit_code}"
        again = case.last(GenerationStartedRecord)
        if again is None or again.t_s < moments.noticed:
            return "the run ended"
        return f"started again after {duration(again.t_s - moments.start)}, and then all ended well"
    if moments.recovered is not None:
        return f"training again after {duration(_downtime_s(case, moments) or 0.0)}"
    if case.last(IncidentClosed) is not None or slow_kind(kind):
        return REPORTED
    return "not over when the journal ends"


def _action(case: IncidentLines) -> str:
    closed = case.last(IncidentClosed)
    if closed is not None:
        return ", then ".join(dict.fromkeys(closed.record.actions[:6]))[:80] or closed.record.action
    done = dict.fromkeys(line.record.action for line in case.of(ActionTaken))
    if done:
        return joined(list(done))
    return "kill and respawn" if case.first(GenerationStartedRecord) is not None else ""


def _verified(closed: IncidentClosed | None) -> tuple[str, ...]:
    if closed is None:
        return ()
    progress, loss = closed.verified.progress, closed.verified.loss
    words = ["progress was made after it" if progress else "no progress was made after it"]
    if loss:
        words.append("the loss continues where it was" if loss == "continuous" else f"loss: {loss}")
    return tuple(words)


def _event(line: JournalLine[Record]) -> TimelineEvent:
    match line.record:
        case WorkersExited(exits=exits):
            text = "; ".join(clean(one.text, 120) for one in exits[:6])
        case ActionTaken(action=action, text=reason):
            text = f"{action}: {reason}"
        case LifecycleChanged(old=old, new=new, text=reason):
            text = f"{old} to {new}: {reason}"
        case Recovered(generation=generation, restored=restored):
            text = f"generation {generation} from {restored or 'start'}"
        case record:
            text = words_of(record)
    return TimelineEvent(line.t_s, line.node, line.record.kind, clean(text, 300))


# --- the sentence -----------------------------------------------------------------------------

_ASIDE = re.compile(r" \((?:pid \d+|the kernel has not run out of memory)\)")
_HAS_STEP = re.compile(r"\bsteps? \d")
_RANK_KIND = re.compile(r"\brank \d+\b")

_LONG = 60
DRILLS = {
    "out of memory": "oom",
    "frozen": "stop",
    "hang in computation": "hang",
    "hang in communication": "partition",
    "skipped collective": "collective-skip",
    "GIL stuck": "gil-hold",
    "busy loop": "busy-loop",
    "input-bound": "slow-input",
    "slow computation": "slow",
    "slow communication": "slow-link",
    "numerical anomaly": "nan",
    "replicas differ": "weight-bitflip",
    "node lost": "node-loss",
    "lead lost": "leader-kill",
    "agent lost": "agent-kill",
}
"""By kind of verdict, the fault of `ftrun inject-fault --list` that looks like it."""

BY_NODE = ("partition", "slow-link", "node-loss", "leader-kill", "agent-kill")
SIGNALS = {"SIGSEGV": "segv", "SIGABRT": "abort", "SIGKILL": "rank-kill", "SIGBUS": "segv"}


def sentence_of(facts: IncidentFacts, case: IncidentLines, verdict_text: str) -> IncidentFacts:
    what = _what(facts, case, verdict_text)
    what += f" ({facts.error_class})" if facts.error_class else ""
    parts = [what, _done(facts, what, case.last(RanksStayed)), _lost(facts)]
    sentence = "; ".join(part for part in parts if part)
    drill, note = drill_of(facts, what)
    return replace(facts, sentence=f"{sentence}.", drill=drill, drill_note=note)


def _what(facts: IncidentFacts, case: IncidentLines, verdict_text: str) -> str:
    if facts.is_planned:
        return f"the run {clean(words_of(case.lines[0].record), 300) or 'was started again'}"
    reported = verdict_text or _cause(case)
    reported = _ASIDE.sub("", reported).strip().rstrip(".") or f"{facts.kind}, cause not known"
    if (
        facts.nodes
        and not any(node in reported for node in facts.nodes)
        and len(facts.culprits) == 1
    ):
        reported = _RANK_KIND.sub(lambda seen: f"{seen[0]} on {facts.nodes[0]}", reported, count=1)
    if facts.step is not None and not _HAS_STEP.search(reported):
        head, colon, tail = reported.partition(": ")
        if len(head) > _LONG:
            reported += f" (step {facts.step:,})"
        else:
            reported = f"{head} at step {facts.step:,}{colon}{tail}"
    return reported


def _cause(case: IncidentLines) -> str:
    if isinstance(case.lines[0].record, MemoryAdopted):
        return "the agent was lost, and another one took over its memory"
    for kind in (
        KillWorkers,
        NodeLost,
        GenerationStartedRecord,
        EndRun,
        LeaderLost,
        SuspicionRaised,
        BallotStarted,
    ):
        if (line := case.first(kind)) is not None and (reported := words_of(line.record)):
            return clean(reported, 500).partition("\n")[0]
    exits = [one for line in case.of(WorkersExited) for one in line.record.exits]
    return exits[0].text if exits else ""


def _done(facts: IncidentFacts, what: str, stayed: JournalLine[RanksStayed] | None) -> str:
    if facts.recovered_s is None:
        return facts.outcome
    ranks = f"all {facts.world_size} ranks" if (facts.world_size or 0) > 1 else "it"
    if stayed is not None and stayed.record.staying:
        ranks = f"{len(stayed.record.started)} of {facts.world_size} ranks"
    is_reported = "no heartbeat for" in what or "no step for" in what
    noticed = (
        "" if facts.noticed_s < 0.01 or is_reported else f"seen after {duration(facts.noticed_s)}, "
    )
    took = duration(facts.recovered_s)
    return f"{noticed}{ranks} started again and training {took} after the fault"


def _lost(facts: IncidentFacts) -> str:
    if facts.recovered_s is None:
        return ""
    if facts.steps_lost is not None:
        again = "no step" if facts.steps_lost == 0 else count(facts.steps_lost, "step")
        return f"{again} done again, nothing lost"
    if not facts.restored:
        return "nothing was restored: the script began at its beginning or at its own checkpoint"
    return ""


def drill_of(facts: IncidentFacts, what: str) -> tuple[str, str]:
    """The command, and what should be known about it."""
    kind = DRILLS.get(facts.kind, "")
    if facts.kind == "crash":
        named = (fault for signal, fault in SIGNALS.items() if signal in what)
        kind = next(named, "rank-kill" if "killed" in what else "exception")
    if not kind:
        return "", "the catalogue of faults has none that looks like this one"
    words = ["ftrun", "inject-fault", kind]
    if kind in BY_NODE:
        if kind not in ("leader-kill", "agent-kill") or facts.nodes:
            words += ["--node", facts.nodes[0] if facts.nodes else "NODE"]
    else:
        words += ["--rank", str(facts.culprits[0]) if facts.culprits else "RANK"]
        if facts.step is not None:
            words += ["--at-step", str(facts.step)]
    note = "in a run that was started with --allow-faults"
    if len(facts.culprits) > 1 and kind not in BY_NODE:
        note += f"; once for each of ranks {joined([str(one) for one in facts.culprits[:8]])}"
    return shlex.join(words), note
