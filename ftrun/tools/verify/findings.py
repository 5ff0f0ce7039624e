"""Finds the reasons of a difference in the records of two runs.

A finding says what in the script is not restored, at which line, and what to do.
"""

import ast
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftrun.cli.screen.text import listed
from ftrun.tools.verify.compare import (
    Difference,
    Life,
    Trace,
    compared_lives,
    differing,
    event_pairs,
    has_session,
    name_of,
    reference_turns,
    word_of,
)
from ftrun.wire.verify_records import BATCH, BOUNDARY, FAILED, FORWARD, OPTIMIZER, VerifyRecord

_SHOWN = 4


@dataclass(frozen=True)
class Finding:
    """State of the script that a restart does not restore; `where` is FILE:LINE."""

    kind: str
    names: tuple[str, ...]
    text: str
    remedy: str = ""
    where: str = ""


def find(
    reference: Trace, trace: Trace, noise: set[str], difference: Difference | None
) -> list[Finding]:
    """Returns all findings, each once; `noise` are the keys that differ without a failure."""
    found = [*_optimizers(trace), *_swaps(reference)]
    for rank, life in compared_lives(trace):
        if life.generation > 0 and life.attached is not None:
            found += _restored(trace[rank], life, noise)
            found += _first_turn(reference, rank, life, noise)
    if difference is not None and difference.generation > 0:
        found += _at(difference, noise)
    found += _reported(trace)
    unique: dict[tuple[str, tuple[str, ...]], Finding] = {}
    for finding in found:
        unique.setdefault((finding.kind, finding.names), finding)
    if difference is not None and not unique:
        return [_unexplained(difference, has_session(trace))]
    return list(unique.values())


def random_sources(reference: Trace, trace: Trace, difference: Difference) -> Finding:
    random: set[str] = set()
    starts = {(0, 0)}
    for rank, life in compared_lives(trace):
        for before in reference.get(rank, ())[:1] if life.generation == 0 else ():
            if life.attached is not None and before.attached is not None:
                keys = differing(before.attached, life.attached)
                random |= {name_of(key) for key in keys if word_of(key) == "random"}
            if life.started is not None and before.started is not None:
                starts.add((before.started.step, life.started.step))
    names = tuple(sorted({name.removeprefix("rng.").split("[")[0] for name in random}))
    first, second = max(starts)
    if first != second:
        text = (
            f"the first of them begins after step {first}, and the other one after step {second}: "
            "the script loads a file that an earlier run wrote, such as its own checkpoint"
        )
        remedy = (
            "let the script load nothing if FTRUN_VERIFY is set in its environment, or end the "
            "runs before the first file is written, with --steps"
        )
    elif names:
        text = f"random states that differ when attach returns: {', '.join(names)}"
        remedy = "seed them at the top of the script, such as torch.manual_seed(0)"
    elif difference.event == BATCH or word_of(difference.keys[0]) == "input":
        text = "the random states are equal, but the data differ"
        remedy = "seed the generators of data set and sampler; sort file lists"
    else:
        text = "random states are equal when attach returns"
        remedy = (
            "look for operations that are not deterministic (torch.use_deterministic_algorithms), "
            "the time of day, races between threads, and files that the first run wrote"
        )
    return Finding("not deterministic", names, text, remedy, _place(difference.record.where))


# --- restore -------------------------------------------------------------------------------------


def _restored(lives: Sequence[Life], life: Life, noise: set[str]) -> Iterator[Finding]:
    assert life.attached is not None
    step = life.start
    if not life.restored:
        text = "no snapshot could be restored: the run restarted at step 0"
        remedy = "see the messages of ftrun in the log of the run"
        yield Finding("not restored", (), text, remedy)
        return
    saved = _boundary_before(lives, life)
    if saved is not None:
        keys = [
            key
            for key in differing(saved, life.attached)
            if word_of(key) in ("tensor", "value", "strides", "random") and key not in noise
        ]
        if names := tuple(name_of(key) for key in keys):
            text = f"the snapshot of step {step} has other values than the end of that step: "
            remedy = (
                "if the script writes to these tensors between two steps (weights swapped by "
                ".data), do it inside `with session.phase(...)`; else report it as a bug"
            )
            yield Finding("snapshot", names, text + _some(names), remedy)
    if life.started is not None:
        overwritten = [
            name_of(key)
            for key in differing(life.attached, life.started)
            if word_of(key) in ("tensor", "value")
        ]
        if overwritten:
            yield _overwritten(overwritten, life.attached)


def _overwritten(names: Sequence[str], record: VerifyRecord) -> Finding:
    text = f"the script changes restored state after attach: {_some(names)}"
    remedy = "call attach after load_state_dict and after the model is initialized"
    return Finding("overwritten", tuple(names), text, remedy, _place(record.where))


def _boundary_before(lives: Sequence[Life], life: Life) -> VerifyRecord | None:
    for earlier in reversed(lives[: lives.index(life)]):
        events = earlier.turns.get(life.start)
        if events and events[-1].event == BOUNDARY:
            return events[-1]
    return None


# --- the first step after a restart --------------------------------------------------------------


def _first_turn(reference: Trace, rank: int, life: Life, noise: set[str]) -> Iterator[Finding]:
    """Yields what differs before the first step after a restart has computed anything."""
    events = life.turns.get(life.start + 1, [])
    inputs = {d for event in events for k, d in event.digests.items() if word_of(k) == "input"}
    if life.started is not None:
        before = _end_of(reference, rank, life.start)
        if before is not None:
            keys = [key for key in differing(before, life.started) if key not in noise]
            yield from _variables(before, life.started, keys, inputs)
            yield from _modules(keys)
        return
    has_other_batch = False
    for step, before, now in event_pairs(reference, rank, life):
        if step != life.start + 1:
            return
        keys = [key for key in differing(before, now) if key not in noise]
        has_other_batch |= now.event == BATCH and bool(keys)
        if now.event not in (FORWARD, OPTIMIZER):
            continue
        changed = now.notes.get("changed", "").split()
        if changed and not before.notes.get("changed"):
            yield _overwritten(changed, now)
        if not has_other_batch:  # otherwise the batch may be the reason
            yield from _variables(before, now, keys, inputs)
        yield from _modules(keys)
        return


def _end_of(reference: Trace, rank: int, step: int) -> VerifyRecord | None:
    """Returns the record with which a rank of the reference entered the step after this one."""
    lives = reference.get(rank, ())
    if step == 0:
        return lives[0].started if lives else None
    events = reference_turns(lives).get(step)
    return events[-1] if events else None


def _variables(
    before: VerifyRecord, now: VerifyRecord, keys: Sequence[str], inputs: set[str]
) -> Iterator[Finding]:
    local = [key for key in keys if word_of(key) == "local"]
    # Inputs of modules come first, then tensors, which may be the rest of the batch.
    local.sort(key=lambda key: now.digests[key] not in inputs)
    batch = [key for key in local if now.digests[key] in inputs]
    if batch:
        batch = [k for k in local if k in batch or now.values.get(k, "").startswith("tensor")]
    kinds = (
        (
            "prefetched batch",
            batch,
            "a batch was prefetched into variables, which are not restored",
            "take the batch at the top of the step, or from session.batches(loader), or keep it "
            "in session.state",
        ),
        (
            "variable",
            [key for key in local if key not in batch],
            "variables of the script are not restored",
            "keep persistent values in session.state, or attach them",
        ),
    )
    for kind, found, head, remedy in kinds:
        if found:
            text = "; ".join(_variable(key, before, now) for key in found[:_SHOWN])
            more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            names = tuple(dict.fromkeys(key.rpartition("|")[2] for key in found))
            yield Finding(kind, names, f"{head}: {text}{more}", remedy, _place(now.where))


def _variable(key: str, before: VerifyRecord, now: VerifyRecord) -> str:
    file, _, line, name = key.removeprefix("local ").split("|", 3)
    lines = lines_that_set(file, name, int(line))
    places = ", ".join(f"{_file(file)}:{at}" for at in lines[:_SHOWN])
    is_now, was = now.values.get(key, ""), before.values.get(key, "")
    change = f" = {is_now} in place of {was}" if is_now != was and is_now and was else ""
    return f"{name}{change} (set at {places})" if places else f"{name}{change}"


def _modules(keys: Sequence[str]) -> Iterator[Finding]:
    kinds = {
        "mode": "the mode of modules, set by train() or eval(), is not restored",
        "buffer": "buffers that are not persistent are not restored",
        "attribute": "plain attributes of modules are not restored",
    }
    remedy = "register them as persistent buffers or give the module a get_extra_state"
    for word, text in kinds.items():
        if names := tuple(name_of(key) for key in keys if word_of(key) == word):
            yield Finding(word, names, f"{text}: {_some(names)}", remedy)


# --- the event that differs ----------------------------------------------------------------------


def _at(difference: Difference, noise: set[str]) -> Iterator[Finding]:
    record, before = difference.record, difference.reference
    if record.event == BATCH:
        yield _batch(difference)
    if record.event == OPTIMIZER or difference.event == BOUNDARY:
        gradients = [k for k in differing(before, record) if word_of(k) == "gradient"]
        unset = tuple(
            name_of(k)
            for k in gradients
            if "none" in (before.digests.get(k), record.digests.get(k))
        )
        if unset:
            text = f"gradients are unset in one run only: {_some(unset)}"
            yield Finding("gradient", unset, text, "use zero_grad(set_to_none=True)")


def _batch(difference: Difference) -> Finding:
    record, before = difference.record, difference.reference
    place = _place(record.where)
    at = f"the loader at {place}" if place else "a loader"
    same_indices = record.digests.get("indices") == before.digests.get("indices")
    workers = int(record.notes.get("workers", "0"))
    if not same_indices or "indices" not in record.digests:
        text = f"{at} returns other samples in step {difference.step} than without the failure"
        remedy = (
            "attach the loader and take its batches from session.batches(loader); give the loader "
            "its generator"
        )
        return Finding("data order", (), text, remedy, place)
    text = f"{at} loads the same samples in step {difference.step} with other values: "
    if workers and record.notes.get("kind") != "stateful":
        text += f"its {workers} worker processes draw random numbers, and a restart does not repeat"
        text += " them"
        remedy = (
            "use torchdata's StatefulDataLoader, or seed the augmentation by the sample's index "
            "and the epoch"
        )
    else:
        text += "the data set draws random numbers that are not restored"
        remedy = (
            "draw them from python's, numpy's or torch's global generator, or attach the generator"
        )
    return Finding("augmentation", (), text, remedy, place)


# --- found in any run ----------------------------------------------------------------------------


def _optimizers(trace: Trace) -> Iterator[Finding]:
    for record in _every_record(trace):
        if record.event == OPTIMIZER and record.notes.get("is_attached") == "0":
            name, place = record.what, _place(record.where)
            text = (
                f"{name}, whose step() is called at {place}, is not attached: its state is in no "
                "snapshot"
            )
            remedy = "pass it to attach, such as attach(optimizer={'a': a, 'b': b})"
            yield Finding("unattached optimizer", (name, place), text, remedy, place)


def _swaps(trace: Trace) -> Iterator[Finding]:
    """Yields weights that are changed in a forward pass, and unchanged in the optimizer step."""
    for lives in trace.values():
        for events in reference_turns(lives).values():
            changed: list[str] = []
            place = ""
            for record in events:
                now = record.notes.get("changed", "").split()
                if record.event == FORWARD and now and not changed:
                    changed, place = now, _place(record.where)
                if record.event == OPTIMIZER:
                    back = tuple(name for name in changed if name not in now)
                    if back:
                        text = (
                            f"between two steps the model runs with other weights at {place}: "
                            f"{_some(back)}; they are restored before the optimizer steps"
                        )
                        remedy = 'put the swap into `with session.phase("eval"):`'
                        yield Finding("weight swap", back, text, remedy, place)
                    break


def _reported(trace: Trace) -> Iterator[Finding]:
    """Yields what ftrun reports, without texts that are parts of others, and failed records."""
    every = list(_every_record(trace))
    notes = {note for record in every if (note := record.notes.get("unprotected"))}
    for note in sorted(notes):
        if not any(note in other for other in notes - {note}):
            yield Finding("reported by ftrun", (note,), f"ftrun reports: {note}")
    for record in every:
        if record.event == FAILED:
            name, place = record.what, _place(record.where)
            text = f"an event at {place} is not compared, because it could not be recorded: {name}"
            yield Finding("not recorded", (name,), text, where=place)


def _every_record(trace: Trace) -> Iterator[VerifyRecord]:
    for _, life in compared_lives(trace):
        for events in life.turns.values():
            yield from events


def _unexplained(difference: Difference, is_attached: bool) -> Finding:
    if not is_attached:
        text = "the script calls no ftrun.attach, and does not continue equally after a restart"
        remedy = "attach its state, or keep all of it in its checkpoints"
        return Finding("not attached", (), text, remedy)
    place = _place(difference.record.where)
    what = f"{difference.event} at {place}".removesuffix(" at ")
    text = (
        f"all records before the {what} are equal: state, random states, inputs and variables. "
        "Something else differs, such as a file, an object in a library, or an iterator that has "
        "values"
    )
    return Finding("unexplained", (), text, "attach the object that has this state", place)


def _some(names: Sequence[str]) -> str:
    return listed(names, _SHOWN)


def _place(where: str) -> str:
    file, _, line = where.rpartition(":")
    return f"{_file(file)}:{line}" if file else ""


def _file(path: str) -> str:
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path


# --- lines of the script -------------------------------------------------------------------------

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def lines_that_set(file: str, variable: str, function_line: int) -> list[int]:
    """Returns lines of a script that assign to `NAME` or `NAME.ATTRIBUTE` in a function.

    `function_line` is the first line of its code; 0 or 1 for the top level.
    """
    tree = _parsed(file)
    if tree is None:
        return []
    scope: ast.AST = tree
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS):
            decorators = [decorator.lineno for decorator in node.decorator_list]
            if function_line in (node.lineno, *decorators):
                scope = node
                break
    attribute = variable.rpartition(".")[2] if "." in variable else None
    if attribute is not None:
        stored = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        return _lines(node for node in stored if node.attr == attribute)
    names = (node for node in _own_nodes(scope) if isinstance(node, ast.Name))
    return _lines(node for node in names if node.id == variable)


def _lines(nodes: Iterable[ast.Name | ast.Attribute]) -> list[int]:
    return sorted({node.lineno for node in nodes if isinstance(node.ctx, ast.Store)})


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a function or module without those of functions and classes in it."""
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            yield node
            waiting += ast.iter_child_nodes(node)


@functools.cache
def _parsed(file: str) -> ast.Module | None:
    try:
        return ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
