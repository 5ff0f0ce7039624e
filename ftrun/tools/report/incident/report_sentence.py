"""An incident in one sentence, and the command that brings the same fault about as a drill.

Runs in: cli. Pure.
"""

import re
import shlex
from dataclasses import replace

from ftrun.cli.screen.text import count, duration, joined
from ftrun.tools.report.facts import IncidentFacts
from ftrun.tools.report.incident.grouping import IncidentLines

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
    "GIL stuck": "gil",
    "busy loop": "spin",
    "input-bound": "slow-input",
    "slow computation": "slow",
    "slow communication": "slow-link",
    "bad numbers": "nan",
    "replicas differ": "weight-bitflip",
    "node lost": "node-loss",
    "lead lost": "lead-kill",
    "agent lost": "agent-kill",
}
"""By kind of verdict, the fault of `ftrun inject-fault --list` that looks like it."""

BY_NODE = ("partition", "slow-link", "node-loss", "lead-kill", "agent-kill")
SIGNALS = {"SIGSEGV": "segv", "SIGABRT": "abort", "SIGKILL": "rank-kill", "SIGBUS": "segv"}


def sentence_of(facts: IncidentFacts, case: IncidentLines, verdict_text: str) -> IncidentFacts:
    """The same facts with the sentence and the drill."""
    what = _what(facts, case, verdict_text)
    parts = [what, _done(facts, what), _lost(facts)]
    sentence = "; ".join(part for part in parts if part)
    drill, note = drill_of(facts, what)
    return replace(facts, sentence=f"{sentence}.", drill=drill, drill_note=note)


def _what(facts: IncidentFacts, case: IncidentLines, verdict_text: str) -> str:
    if facts.is_planned:
        line = case.lines[0]
        return f"the run {line.text('text', 300) or line.text('why', 300) or 'was started again'}"
    told = verdict_text or _cause(case)
    told = _ASIDE.sub("", told).strip().rstrip(".") or f"{facts.kind}, cause not known"
    if facts.nodes and not any(node in told for node in facts.nodes) and len(facts.culprits) == 1:
        told = _RANK_KIND.sub(lambda seen: f"{seen[0]} on {facts.nodes[0]}", told, count=1)
    if facts.step is not None and not _HAS_STEP.search(told):
        head, colon, tail = told.partition(": ")
        if len(head) > _LONG:
            told += f" (step {facts.step:,})"
        else:
            told = f"{head} at step {facts.step:,}{colon}{tail}"
    return told


def _cause(case: IncidentLines) -> str:
    if case.lines[0].kind == "adopted":
        return "the agent was lost, and another one took over the memory it had left"
    for kind, name in (
        ("KillWorkers", "why"),
        ("NodeLost", "text"),
        ("StartGeneration", "why"),
        ("EndRun", "why"),
        ("LeadLost", "text"),
        ("Suspected", "text"),
        ("Ballot", "text"),
    ):
        line = case.first(kind)
        if line is not None and (told := line.text(name, 500)):
            return told.partition("\n")[0]
    texts = (one.get("text") for line in case.of("WorkersExited") for one in line.parts("exits"))
    return next((one for one in texts if isinstance(one, str)), "")


def _done(facts: IncidentFacts, what: str) -> str:
    if facts.recovered_s is None:
        return facts.outcome
    whom = f"all {facts.world_size} ranks" if (facts.world_size or 0) > 1 else "it"
    is_told = "silent for" in what or "no step for" in what
    noticed = (
        "" if facts.noticed_s < 0.01 or is_told else f"seen after {duration(facts.noticed_s)}, "
    )
    took = duration(facts.recovered_s)
    return f"{noticed}{whom} started again and training {took} after the fault"


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
        if kind not in ("lead-kill", "agent-kill") or facts.nodes:
            words += ["--node", facts.nodes[0] if facts.nodes else "NODE"]
    else:
        words += ["--rank", str(facts.culprits[0]) if facts.culprits else "RANK"]
        if facts.step is not None:
            words += ["--at-step", str(facts.step)]
    note = "in a run that was started with --allow-faults"
    if len(facts.culprits) > 1 and kind not in BY_NODE:
        note += f"; once for each of ranks {joined([str(one) for one in facts.culprits[:8]])}"
    return shlex.join(words), note
