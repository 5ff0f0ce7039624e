"""Lists the tensors that each rank stores, with the parameter of each state tensor.

Runs in the process that converts checkpoints, and in a worker if a restore uses layout rules.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ftrun.errors import RulesMismatch
from ftrun.sharding.source_index import OURS
from ftrun.sharding.world_layout import StoredEntry
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.layout import PLAIN_NAME
from ftrun.snapshot.plain_values import TensorRef
from ftrun.snapshot.shard_header import ShardHeader

Reads = Callable[[int, int], memoryview]
"""Gets an offset into a shard's data and a number of bytes; returns these bytes."""


def stored_entries(
    heads: Sequence[ShardHeader], parts: Sequence[Mapping[str, bytes]], *, source: str
) -> list[list[StoredEntry]]:
    """The entries of each rank.

    Args:
        heads: of all ranks, from rank 0.
        parts: the plain values of each rank: the bytes of each part, by name.
        source: of the rules, for messages.

    Raises:
        RulesMismatch: there are DTensors, which rules do not describe; or no session saved them.
    """
    if not all("optimizer_state" in one for one in parts):
        problem = (
            "it was saved by ftrun.dcp, not by a session of ftrun.attach: dcp.load takes it into "
            "any layout, without rules and without converting"
        )
        raise RulesMismatch(source=source, problems=[problem])
    found, sharded = [], []
    for head, plain_parts in zip(heads, parts, strict=True):
        owners = _owners(plain_parts)
        entries = [one for one in head.layout.entries if not one.name.startswith(OURS)]
        sharded += [one.name for one in entries if one.part is not None]
        found.append([StoredEntry(e.name, e.dtype, e.shape, owners.get(e.name)) for e in entries])
    if sharded:
        raise RulesMismatch(
            source=source,
            problems=[
                f"{name} is a DTensor: a run of any layout goes on from it by itself, without "
                "rules and without converting"
                for name in dict.fromkeys(sharded)
            ],
        )
    return found


def plain_bytes(head: ShardHeader, read: "Reads") -> dict[str, bytes]:
    """The plain values of a shard: the bytes of each part, by name."""
    at = head.entries[PLAIN_NAME].offset
    length = int.from_bytes(read(at, 8), "little")
    found: dict[str, bytes] = plain.decode(read(at + 8, length))
    return found


def _owners(parts: Mapping[str, bytes]) -> dict[str, str]:
    """The parameter of each tensor of optimizer state, by the tensor's name."""
    found: dict[str, str] = {}
    for saved in plain.decode(parts["optimizer_state"]).values():
        for parameter, values in saved["state"].items():
            if isinstance(parameter, str):
                found.update(dict.fromkeys(_references(values), parameter))
    return found


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, TensorRef):
        yield value.name
    elif isinstance(value, dict):
        for one in value.values():
            yield from _references(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _references(one)
