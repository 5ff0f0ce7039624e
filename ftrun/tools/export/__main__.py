"""Exports a checkpoint: `python -m ftrun.tools.export.__main__`.

Runs in:  a process that the cli starts. torch is loaded only if the format or the dtype needs it.
Takes in: an `ExportJob` as JSON on stdin.
Gives:    `ExportReport` as JSON on stdout; a complete directory or file, or nothing.
Survives: a run that writes to the same directory; files that it removes are already open.
"""

import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from ftrun import clock
from ftrun.cli.screen.atomic_output import check_free, staged_output
from ftrun.errors import FtrunError
from ftrun.snapshot.plain_values import TensorRef
from ftrun.tools.export.safetensors import left_out_of_safetensors, write_safetensors
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
    images = DiskImages(order.source.shards)
    try:
        world = ExportSource(images)
        outline = world.outline(NameFilter(order.only), is_whole=order.format != "safetensors")
        left_out = list(world.left_out)
        if order.format == "safetensors":
            left_out += left_out_of_safetensors(outline)
        with staged_output(out) as made:
            num_tensors = _write(made, outline, world, order)
    finally:
        images.close()
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
        tree = _Filled(outline, world, order, lambda _, *kind: placeholders.make(*kind))
        write_dcp(made, tree.of(by_index=False), placeholders, num_writers=order.num_writers)
        return tree.num_tensors
    from ftrun.tools.export.state_dict import PlaceholderTensors, write_state_dict

    rooms = PlaceholderTensors()
    tree = _Filled(outline, world, order, rooms.make)
    write_state_dict(made, tree.of(by_index=True), rooms, world, num_writers=order.num_writers)
    return tree.num_tensors


class _Filled:
    """The tree of an outline with a placeholder of the format in place of each reference.

    `make` returns the placeholder for a name, a tensor and a dtype.
    """

    def __init__(
        self, outline: ExportOutline, world: ExportSource, order: ExportJob, make: Any
    ) -> None:
        self._outline = outline
        self._world = world
        self._dtype = order.dtype
        self._make = make
        self._learned = {name for names in outline.modules.values() for name in names.values()}
        self.num_tensors = 0

    def of(self, *, by_index: bool) -> dict[str, Any]:
        tree = replaced(self._outline.tree(by_index=by_index), self._leaf)
        assert isinstance(tree, dict)
        return tree

    def _leaf(self, value: object) -> object:
        if isinstance(value, TensorRef):
            tensor = self._world.whole(value.name)
            self.num_tensors += 1
            if value.kind == "array":
                self._world.note(f"{value.name} is a numpy array; it is written as a tensor")
            wanted = self._dtype if value.name in self._learned else ""
            return self._make(value.name, tensor, dtype_out(tensor, wanted))
        if type(value).__module__ == "numpy":
            return value.item()  # type: ignore[attr-defined]
        return value


if __name__ == "__main__":
    sys.exit(main())
