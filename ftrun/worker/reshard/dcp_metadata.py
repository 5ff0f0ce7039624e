"""Converts DCP's description of a checkpoint to plain values, and back.

Runs in:  worker, in the thread that saves or loads.
Takes in: the `Metadata` from DCP's planner, with the location of each item; such plain values.
Gives:    values that `snapshot/plain_values.py` encodes; the `Metadata`, with the locations as its
          storage_data.

A snapshot contains no pickles of its own, so this module converts the objects field by field. The
data that a planner adds (`planner_data`) must be plain. That of torch's own planners is: a path of
keys for each name.

Source: torch.distributed.checkpoint.metadata (read in 2.13).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ftrun.errors import LayoutUnknown, ValueNotStorable
from ftrun.ids import Rank
from ftrun.worker.state.tensors import DTYPE_NAMES, DTYPES

Place = tuple[int, str]
"""Rank whose shard holds an item, and the name of its entry; for bytes the item's own name."""

Places = Mapping[MetadataIndex, Place]

_ITEM_BYTES = 160
_NAME_TIMES = 4


def pack(metadata: Metadata, places: Places) -> dict[str, Any]:
    """Convert the description to plain values.

    Args:
        metadata: from the planner; its own storage_data is left out.
        places: of every item.

    Raises:
        ValueNotStorable: a dtype or a kind of metadata cannot be stored.
        KeyError: an item has no location.
    """
    meta = metadata.storage_meta
    return {
        "items": {
            name: _pack_item(name, about, places)
            for name, about in metadata.state_dict_metadata.items()
        },
        "planner_data": metadata.planner_data,
        "checkpoint_id": None if meta is None else _text(meta.checkpoint_id),
        "save_id": None if meta is None else meta.save_id,
        "modules": [] if meta is None else list(meta.modules),
        "version": getattr(metadata, "version", None),
    }


def unpack(packed: dict[str, Any]) -> Metadata:
    """Convert plain values to the description for DCP's planners.

    Raises:
        LayoutUnknown: the values have another form.
    """
    items: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, Place] = {}
    try:
        for name, item in packed["items"].items():
            if "size" in item:
                items[name] = _tensor(item)
                for offsets, _, rank, entry in item["chunks"]:
                    places[MetadataIndex(name, offsets)] = (rank, entry)
            else:
                items[name] = BytesStorageMetadata()
                places[MetadataIndex(name)] = tuple(item["at"])
        found = Metadata(
            items,
            packed["planner_data"],
            places,
            StorageMeta(
                checkpoint_id=packed["checkpoint_id"],
                save_id=packed["save_id"],
                modules=packed["modules"],
            ),
        )
        if packed["version"] is not None:
            found.version = packed["version"]
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise LayoutUnknown(
            f"the description of the checkpoint is not readable: {error!r}"
        ) from error
    return found


def room_for(names: Mapping[str, int]) -> int:
    """Estimated size of the description in bytes, before DCP has made it.

    Args:
        names: of all items, with the number of chunks of each.
    """
    return sum(_NAME_TIMES * len(name) + _ITEM_BYTES * count for name, count in names.items())


def place_of(places: Places, index: MetadataIndex) -> tuple[Rank, str]:
    """The rank and the entry that hold an item.

    Raises:
        LayoutUnknown: no shard holds it.
    """
    found = places.get(index)
    if found is None:
        raise LayoutUnknown(f"{index.fqn} at {list(index.offset or ())} is in no shard")
    return Rank(found[0]), found[1]


def _pack_item(name: str, about: object, places: Places) -> dict[str, Any]:
    if isinstance(about, BytesStorageMetadata):
        return {"at": list(places[MetadataIndex(name)])}
    if not isinstance(about, TensorStorageMetadata) or about.properties.dtype not in DTYPE_NAMES:
        raise ValueNotStorable(key=name, kind=f"{type(about).__name__} ({about})")
    properties = about.properties
    return {
        "dtype": DTYPE_NAMES[properties.dtype],
        "requires_grad": properties.requires_grad,
        "pin_memory": properties.pin_memory,
        "size": tuple(about.size),
        "chunks": [
            (tuple(chunk.offsets), tuple(chunk.sizes), *places[MetadataIndex(name, chunk.offsets)])
            for chunk in about.chunks
        ],
    }


def _tensor(item: dict[str, Any]) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(
            dtype=DTYPES[item["dtype"]],
            requires_grad=item["requires_grad"],
            pin_memory=item["pin_memory"],
        ),
        size=torch.Size(item["size"]),
        chunks=[
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes, _, _ in item["chunks"]
        ],
    )


def _text(checkpoint_id: object) -> str | None:
    return None if checkpoint_id is None else str(checkpoint_id)
