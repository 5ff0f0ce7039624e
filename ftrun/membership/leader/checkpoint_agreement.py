"""Whether all members of an accepted plan start from the same state, and what follows if not.

Rule 1: each node loads the newest checkpoint that no node has rejected. If the nodes have loaded
        different ones, checkpoints that not all nodes can load are rejected, and another ballot
        begins. Each such ballot rejects at least one, so the ballots end.
Rule 2: a node that has a problem and names no new checkpoint that caused it can load none. If
        others can, and are enough, the run continues without that node, see `blocked_nodes`. The
        same applies if it names a checkpoint that others have loaded. To reject that checkpoint
        does not help this node, and may take their only one from the others.
Rule 3: the run ends when too few nodes are left by rule 2.
"""

from collections.abc import Mapping

from ftrun.errors import ExitCode
from ftrun.ids import version
from ftrun.records.membership import NodeUnfit
from ftrun.recovery.commands import EndRun, JournalEntry
from ftrun.wire.cluster.generation import GenerationPlan
from ftrun.wire.cluster.membership import Accepted


def disagreement(
    plan: GenerationPlan, answers: Mapping[str, Accepted]
) -> EndRun | dict[str, str] | None:
    """Why an accepted plan cannot be carried out: the end, or checkpoints to reject, and why."""
    accepted = {node.node_id: answers[node.node_id] for node in plan.members}
    problems = {node_id: has.problem for node_id, has in accepted.items() if has.problem}
    starts = {(has.restored, has.checkpoint) for has in accepted.values()}
    if not problems and len(starts) == 1:
        return None
    bad = {**_not_loaded_by_all(accepted), **_rejected(accepted)}
    known = plan.history.bad_checkpoints
    if new := {name: reason for name, reason in bad.items() if name not in known}:
        return new
    if problems:
        # If no checkpoint is left, all nodes report the same problem.
        same = set(problems.values())
        one = f"{', '.join(sorted(problems))}: {next(iter(same))}"
        each = "; ".join(f"{node_id}: {text}" for node_id, text in sorted(problems.items()))
        code = next(has.code for has in accepted.values() if has.problem)
        return EndRun(code, one if len(same) == 1 else each)
    found = ", ".join(
        f"{node_id} {version(*has.restored) if has.restored else 'nothing'}"
        for node_id, has in sorted(accepted.items())
    )
    detail = f"the nodes have loaded different checkpoints: {found}"
    return EndRun(ExitCode.STATE_LOST, f"{detail}. Use the same --checkpoint-dir on all nodes")


def blocked_nodes(
    plan: GenerationPlan, answers: Mapping[str, Accepted], differ: EndRun | dict[str, str]
) -> dict[str, str]:
    """Members that cannot load what other members can, and their problems."""
    accepted = [(node.node_id, answers[node.node_id]) for node in plan.members]
    loaded = {has.checkpoint for _, has in accepted if not has.problem}
    cannot = [one for one in accepted if one[1].problem and one[1].code == ExitCode.STATE_LOST]
    if not isinstance(differ, EndRun):
        cannot = [one for one in cannot if loaded & one[1].rejected.keys()]
    problems = {node_id: has.problem for node_id, has in cannot}
    return problems if len(problems) < len(accepted) else {}


def blocked_text(blind: Mapping[str, str]) -> list[JournalEntry]:
    text = "node {} may not run ranks for an hour: it cannot load the checkpoint: {}"
    return [
        JournalEntry(NodeUnfit(text.format(node_id, detail), node_id), announce=True)
        for node_id, detail in sorted(blind.items())
    ]


def _rejected(accepted: Mapping[str, Accepted]) -> dict[str, str]:
    found: dict[str, str] = {}
    for node_id, has in sorted(accepted.items()):
        for name, reason in has.rejected.items():
            answered = f"{node_id}: {reason}"
            found[name] = f"{found[name]}; {answered}" if name in found else answered
    return found


def _not_loaded_by_all(accepted: Mapping[str, Accepted]) -> dict[str, str]:
    """Checkpoints that only some nodes have loaded, except the oldest.

    Empty if a node without a problem has loaded none.
    """
    loaded: dict[str, set[str]] = {}
    steps: dict[str, int] = {}
    for node_id, has in accepted.items():
        if has.problem:
            continue
        if not has.checkpoint or has.restored is None:
            return {}
        loaded.setdefault(has.checkpoint, set()).add(node_id)
        steps[has.checkpoint] = has.restored[1]
    newer = sorted(loaded, key=lambda name: (steps[name], name))[1:]
    return {
        name: f"{', '.join(sorted(set(accepted) - loaded[name]))} did not load it" for name in newer
    }
