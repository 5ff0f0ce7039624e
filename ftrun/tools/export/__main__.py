"""Exports a checkpoint: `python -m ftrun.tools.export.__main__`.

Runs in:  a process that the cli starts. torch is loaded only if the format or the dtype needs it.
Takes in: an `ExportJob` as JSON on stdin.
Gives:    `ExportReport` as JSON on stdout; a complete directory or file, or nothing.
Survives: a run that writes to the same directory; files that it removes are already open.
"""

import signal
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from ftrun import clock
from ftrun.cli.screen.atomic_output import check_free, staged_output
from ftrun.errors import FtrunError
from ftrun.smp.checkpoint.storage.local import LocalStorage
from ftrun.snapshot.plain_values import TensorRef
from ftrun.tools.export.safetensors import write_safetensors
from ftrun.tools.export.selection import ExportOutline, NameFilter, replaced
from ftrun.tools.export.source import ExportSource
from ftrun.tools.export.tensor_writer import dtype_out
from ftrun.wire.messages.checkpoint import ExportJob, ExportReport
from ftrun.worker.reshard.source import DiskImages


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=ExportJob)
    started_s = clock.now_s()
    facts = ExportReport(order.source.path, order.source.step, order.format, order.out)
    try:
        facts = _export(order, facts)
    except FtrunError as error:
        facts = msgspec.structs.replace(facts, problem=str(error))
    except ImportError as error:
        problem = (
            f"this format or dtype needs torch, which cannot be loaded: {error}. --format "
            "safetensors without --dtype does not need it"
        )
        facts = msgspec.structs.replace(facts, problem=problem)
    except OSError as error:
        reason = error.strerror or str(error)
        problem = f"{order.out} is not written: {reason}. Nothing of it remains"
        facts = msgspec.structs.replace(facts, problem=problem)
    facts = msgspec.structs.replace(facts, seconds=clock.now_s() - started_s)
    sys.stdout.buffer.write(msgspec.json.encode(facts))
    return 0


def _end(number: int, _: object) -> NoReturn:
    """Exits by an exception, so that incomplete files are removed."""
    sys.exit(128 + number)


def _export(order: ExportJob, facts: ExportReport) -> ExportReport:
    out = Path(order.out)
    is_folder = order.format != "state_dict"
    check_free(out, is_folder=is_folder, may_replace=order.may_replace)
    folder = Path(order.source.path)
    storage = LocalStorage(folder.parent, threading.Event())
    with storage.reading(folder.name), closing(DiskImages(order.source.shards)) as images:
        world = ExportSource(images)
        outline = world.outline(NameFilter(order.only), is_whole=order.format != "safetensors")
        left_out = list(world.left_out)
        if order.format == "safetensors":
            reason = "safetensors files hold tensors of modules only"
            left_out += [f"{name}: {reason}" for name in outline.others]
        with staged_output(out) as made:
            num_tensors = _write(made, outline, world, order)
    files = sorted(out.iterdir()) if is_folder else [out]
    return msgspec.structs.replace(
        facts,
        files=tuple(path.name for path in files),
        num_tensors=num_tensors,
        num_bytes=sum(path.stat().st_size for path in files),
        left_out=tuple(left_out),
        notes=tuple(world.notes),
    )


def _write(made: Path, outline: ExportOutline, world: ExportSource, order: ExportJob) -> int:
    """Writes the export; returns the number of its tensors."""
    if order.format == "safetensors":
        return write_safetensors(made, outline, world, order)
    if order.format == "dcp":
        from ftrun.tools.export.dcp import Placeholders, write_dcp

        placeholders = Placeholders(world)
        tree, num_tensors = _filled(outline, world, order, placeholders.make, by_index=False)
        write_dcp(made, tree, placeholders, num_writers=order.num_writers)
        return num_tensors
    from ftrun.tools.export.state_dict import PlaceholderTensors, write_state_dict

    rooms = PlaceholderTensors()
    tree, num_tensors = _filled(outline, world, order, rooms.make, by_index=True)
    write_state_dict(made, tree, rooms, world, num_writers=order.num_writers)
    return num_tensors


def _filled(
    outline: ExportOutline, world: ExportSource, order: ExportJob, make: Any, *, by_index: bool
) -> tuple[dict[str, Any], int]:
    """Returns the tree with a placeholder in place of each reference, and their number.

    `make` returns the placeholder for a name, a tensor and a dtype.
    """
    learned = {name for names in outline.modules.values() for name in names.values()}
    num_tensors = 0

    def leaf(value: object) -> object:
        nonlocal num_tensors
        if isinstance(value, TensorRef):
            tensor = world.whole(value.name)
            num_tensors += 1
            if value.kind == "array":
                world.note(f"{value.name} is a numpy array; it is written as a tensor")
            wanted = order.dtype if value.name in learned else ""
            return make(value.name, tensor, dtype_out(tensor, wanted))
        if type(value).__module__ == "numpy":
            return value.item()  # type: ignore[attr-defined]
        return value

    tree = replaced(outline.tree(by_index=by_index), leaf)
    assert isinstance(tree, dict)
    return tree, num_tensors


if __name__ == "__main__":
    sys.exit(main())
