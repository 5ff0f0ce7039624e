"""What says so: stacks, the delay matrix, and the words of the kernel.

Runs in:  cli. Pure.
Takes in: the lines of one incident.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ftrun.cli.screen.text import by_number, clean, duration, number, texts, whole
from ftrun.monitor.verdicts import RankView
from ftrun.tools.report.facts import DelayView, StackView
from ftrun.tools.report.incident.grouping import IncidentLines
from ftrun.tools.report.journal import JournalLine

_MAX_FRAMES = 40
_MAX_NODES = 64


def stacks_of(
    judged: JournalLine | None, culprits: Sequence[int], victims: Sequence[int], case: IncidentLines
) -> Iterable[StackView]:
    """Of the culprits that have one, at most two, and of one victim."""
    views = {whole(one.get("rank")): one for one in (judged.parts("ranks") if judged else ())}
    others = [one for one in (*victims, *views) if one is not None and one not in culprits]
    for role, chosen, most in (("culprit", culprits, 2), ("victim", others, 1)):
        shown = 0
        for rank in chosen:
            frames = texts(views.get(rank, {}).get("stack"), most=_MAX_FRAMES)
            if frames and shown < most:
                shown += 1
                own = RankView(rank, 0, "", 0, 0.0, stack=frames).place
                yield StackView(f"rank {rank} ({role})", _doing(views[rank]), frames, own)
    for line in case.of("WorkersExited")[:1]:
        for one in line.parts("exits")[:2]:
            detail = one.get("detail")
            if isinstance(detail, str) and detail.strip():
                frames = tuple(clean(detail, 6000).rstrip().splitlines()[-_MAX_FRAMES:])
                yield StackView(f"rank {whole(one.get('rank'))}: its exception", "", frames)


def _doing(view: Mapping[str, Any]) -> str:
    words = []
    if (step := whole(view.get("step"))) is not None:
        words.append(f"at step {step:,}")
    if (silent_s := number(view.get("silent_s"))) is not None:
        words.append(f"silent for {duration(silent_s)}")
    if (cpu := number(view.get("cpu"))) is not None:
        words.append(f"uses {cpu:.2f} cores")
    if process := clean(str(view.get("process") or view.get("state") or ""), 20):
        words.append(f"process state {process}")
    if view.get("holds_gil") is True:
        words.append("holds the GIL")
    groups = view.get("groups")
    for group in groups[:3] if isinstance(groups, list) else ():
        seq = whole(group.get("waits_seq")) if isinstance(group, dict) else None
        if seq:
            words.append(f"waits in {collective(group)}")
    return ", ".join(words)


def collective(group: Mapping[str, Any]) -> str:
    """`all_reduce #41,207 of group default_pg`."""
    seq = whole(group.get("waits_seq")) or 0
    calls = group.get("calls")
    ops = [one.get("op") for one in (calls if isinstance(calls, list) else ())
           if isinstance(one, dict) and whole(one.get("seq")) == seq]  # fmt: skip
    name = clean(str(group.get("desc") or group.get("name") or ""), 60)
    return f"{clean(str(ops[0] if ops else 'collective'), 40)} #{seq:,}" + (
        f" of group {name}" if name else "")  # fmt: skip


def delays_of(case: IncidentLines) -> DelayView | None:
    """The newest matrix: a list of cells with `sender` and `receiver`, beside a verdict."""
    for line in reversed(case.of("Verdict", "IncidentClosed")):
        for where in (line.fields, line.part("verdict")):
            for name in ("matrix", "delays", "links"):
                cells = where.get(name)
                if isinstance(cells, list) and (found := _matrix(cells)) is not None:
                    return found
    return None


def _matrix(cells: list[object]) -> DelayView | None:
    rows = [one for one in cells[: _MAX_NODES**2] if isinstance(one, dict)]
    pairs = [(str(one.get("sender")), str(one.get("receiver")), one) for one in rows
             if one.get("sender") is not None and one.get("receiver") is not None]  # fmt: skip
    known = {name for sender, receiver, _ in pairs for name in (sender, receiver)}
    names = sorted(known, key=by_number)
    names = names[:_MAX_NODES]
    if not names:
        return None
    per_mb = any(number(one.get("s_per_mb")) is not None for _, _, one in pairs)
    key = "s_per_mb" if per_mb else "rtt_s"
    at = {name: index for index, name in enumerate(names)}
    table: list[list[float | None]] = [[None] * len(names) for _ in names]
    hot = []
    for sender, receiver, one in pairs:
        if sender in at and receiver in at:
            table[at[sender]][at[receiver]] = number(one.get(key))
            if one.get("is_hot") is True:
                hot.append((at[sender], at[receiver]))
    shown = tuple(clean(name, 30) for name in names)
    title = "time per megabyte" if per_mb else "round trip"
    return DelayView(shown, shown, tuple(tuple(row) for row in table), title, tuple(hot))


def evidence_of(case: IncidentLines, acted: float | None) -> Iterable[str]:
    """What older journals tell without a verdict; ends that ftrun itself made say nothing."""
    told = [line for line in case.of("WorkersExited") if acted is None or line.t_s <= acted]
    for line in told[:1]:
        yield from (f"{clean(str(one.get('text') or ''), 300)}: the kernel's own word"
                    for one in line.parts("exits")[:8])  # fmt: skip
    yield from (line.text("text", 300) for line in case.of("NodeLost", "LeadLost")[:4])
    if case.first("adopted") is not None:
        yield "an agent found memory that another one had left, which had said nothing of an end"
