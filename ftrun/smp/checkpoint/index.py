"""The index and the parts of a checkpoint, and their files.

Runs in:  the SMP, in its disk lane's thread.
Takes in: a checkpoint's folder; the parts of a checkpoint that several nodes write.
Gives:    a `CheckpointIndex` or a `CheckpointPart`, or a `CheckpointError`.

The files of an index and of a part carry their own digest: the text and its xxh3.
"""

from typing import TypeVar

import msgspec
import xxhash

from ftrun.errors import CheckpointError

FORMAT = 1
_T = TypeVar("_T", "CheckpointIndex", "CheckpointPart")


class ShardFile(msgspec.Struct, frozen=True):
    """One rank's files in a checkpoint, as recorded in the index."""

    rank: int
    file: str
    digests: str
    num_bytes: int
    num_pieces: int
    layout_id: str  # hexadecimal like the digests: not every JSON reader keeps 64-bit numbers
    table_digest: str
    header_digest: str

    @property
    def names(self) -> tuple[str, str]:
        return self.file, self.digests

    @property
    def content(self) -> tuple[int, int, str, str]:
        """Two are equal exactly if the rank and all its bytes are equal."""
        return self.rank, self.num_bytes, self.layout_id, self.table_digest


class CheckpointIndex(msgspec.Struct, frozen=True):
    """The index of a checkpoint. `serial` grows with each index written to its directory."""

    format: int
    serial: int
    run_id: str
    generation: int
    step: int
    world_size: int
    shards: list[ShardFile]
    life: str = ""
    """Of the run that wrote it; see `GenerationPlan.life`."""
    written_s: float = 0.0
    """Wall time; 0 if only the index file's own time is known."""


class CheckpointPart(msgspec.Struct, frozen=True):
    """What one node has written of a checkpoint.

    Its generation is -1 if the version was loaded from another checkpoint.
    """

    format: int
    run_id: str
    token: str
    generation: int
    step: int
    world_size: int
    shards: list[ShardFile]
    life: str = ""
    written_s: float = 0.0

    @property
    def key(self) -> tuple[str, str, int, int, int]:
        return self.run_id, self.token, self.generation, self.step, self.world_size


class DigestedFile(msgspec.Struct, frozen=True):
    """The content of index.json or of a part file: the text and its xxh3."""

    digest: str
    index: msgspec.Raw


def seal(content: CheckpointIndex | CheckpointPart) -> bytes:
    text = msgspec.json.format(msgspec.json.encode(content), indent=1)
    return msgspec.json.encode(DigestedFile(xxhash.xxh3_64_hexdigest(text), msgspec.Raw(text)))


def parse_index(data: bytes, *, what: str) -> CheckpointIndex:
    return _parse(data, CheckpointIndex, what=f"{what}: its index")


def parse_part(data: bytes, *, what: str) -> CheckpointPart:
    return _parse(data, CheckpointPart, what=f"{what}: the part")


def _parse(data: bytes, kind: type[_T], *, what: str) -> _T:
    try:
        sealed = msgspec.json.decode(data, type=DigestedFile)
        if xxhash.xxh3_64_hexdigest(bytes(sealed.index)) != sealed.digest:
            raise CheckpointError(f"{what} is damaged: its digest does not match")
        content = msgspec.json.decode(sealed.index, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{what} is not valid: {error}") from error
    if content.format != FORMAT:
        raise CheckpointError(f"{what} has format {content.format}; only {FORMAT} is supported")
    return content
