"""Shared pages through which a worker reports and receives values without messages.

Runs in:  worker (writes its heartbeat page, reads the command page), agent and SMP.
Takes in: a descriptor of one page.
Gives:    named 8-byte fields. Each is written in one store. No two fields depend on each other,
          except where a write order is stated below.
Survives: the worker. The agent reads how far a dead worker had come.

All times are nanoseconds of the monotonic clock, which all processes of a machine share. 0 means
"not yet".

A rank also has a memory file with its stacks and its last collectives, which the agent reads even
after its death: text of faulthandler, partly written from a signal handler in C, before offset
`CALLS_AT`, and torch's flight recorder as JSON after it.
"""

import mmap
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum

import xxhash

from ftrun.monitor.order.messages import RecordedMessage
from ftrun.monitor.page_values import FORGET_AT, NUM_BUCKETS, bucket_of
from ftrun.monitor.repeat_check import BoundaryRecord
from ftrun.wire.shared_memory.message_ring import RING_BYTES, read_messages

PAGE_BYTES = 53248 + RING_BYTES + 4096
_TIMES_AT = 64  # in words: counts of step times by bucket, then their sum
_NUM_TIMES_AT = _TIMES_AT + NUM_BUCKETS
_CALLS_AT = 200  # in words: pairs of a step and the collectives called up to it
_CALLS_EVERY = (1, 8, 64, 512)
_SLOW_CAPTURE_AT, _SLOW_CAPTURE_BYTES = 1664, 384
_BACKENDS_AT, _BACKENDS_BYTES = 3200, 896
_GROUPS_AT, _GROUPS_BYTES = 4096, 4096
MAX_GROUPS_BYTES = _GROUPS_BYTES - 2
MAX_BACKENDS_BYTES = _BACKENDS_BYTES - 2
NEVER_STEP = (1 << 63) - 1
_NO_CAPTURE = 1

MAX_SAMPLES = 32  # maximum number of parameters of which a boundary record has a digest
NUM_RECORDS = 256  # boundary records on a page; a newer record replaces the oldest
MAX_SAMPLE_NAME_BYTES = 120
_RECORDS_AT = 12288
_MESSAGES_AT = 53248
_STAY_PROBLEM_AT, _STAY_PROBLEM_BYTES = _MESSAGES_AT + RING_BYTES, 512
_RECORD = struct.Struct(f"<IIIIqq{4 * MAX_SAMPLES}s")
"""Check, whether there is a loss, digests that are set, 0, step, bits of the loss, digests."""

_RECORD_BYTES = _RECORD.size
_CHECK_BYTES = 4


class HeartbeatField(IntEnum):
    """Fields of a heartbeat page: worker -> agent, except `READING_NS` and `CALLS_ASKED`."""

    PID = 0
    GENERATION = 1
    STARTED_NS = 2  # start of the first line of the user's script
    STEP = 3  # step boundaries passed, or optimizer steps if nothing is attached
    HEARTBEAT_NS = 4  # time of the last one, or of a later step of any optimizer
    FIRST_STEP_NS = 5  # end of the first step of this incarnation
    ATTACHED = 6
    ATTACH_NS = 7
    RESTORE_BEGIN_NS = 8
    RESTORE_END_NS = 9
    RESTORED_GENERATION = 10  # of the restored version; valid once RESTORE_END_NS is set
    RESTORED_STEP = 11
    SEALED_GENERATION = 12
    SEALED_STEP = 13
    SEALED_NS = 14  # written last of the three
    SEALED_COUNT = 15
    SKIPPED_COUNT = 16  # snapshots that were due before the last one was committed
    DISCARDED_COUNT = 17  # snapshots discarded because a tensor changed during the copy
    BLOCKED_NS = 18  # total time that snapshots blocked the training thread
    IMAGE_BYTES = 19
    UNPROTECTED = 20  # no snapshots are taken; the note has the reason
    LOSS = 21  # a float
    OPTIMIZER_STEPS = 22
    INIT_GROUP_NS = 23  # end of the first init_process_group
    FAILED_NS = 24  # an exception reached the top level of the script
    STOPPED_AT_BOUNDARY = 25  # waits at a boundary for the end; its last snapshot is sealed
    REQUESTED_EVERY = 26  # snapshot interval in steps that this rank's measurements suggest
    CORRUPT_SLOT = 27  # 1 + the slot whose digest did not match at the restore
    CORRUPT_RANK = 28  # 1 + rank of the previous world that owns the slot; 0: this rank
    NUMERICAL_ANOMALY_STEP = 29  # first step after which a parameter was not a finite number
    HAS_SERVER = 30  # the flight recorder can be read on the agent's named socket
    HAS_DUMPER = 31  # signal number that writes all stacks to the stack file
    CAPTURES = 32  # of device graphs: 0: not observed, 1: none in progress, 2: one in progress
    TIMED = 33  # recorders of device collectives have start events
    REPLAYS = 34  # replays of device graphs; their collectives are in no recorder
    READING_NS = 35  # set by the agent: it queries events until then, so no capture begins
    DEVICE_NS = 36  # torch has initialised a device
    CALLS_ASKED = 37  # set by the agent: number of its request to write the collectives
    CALLS_WRITTEN = 38  # number of the request that was answered last, in the stack file
    STEP_NS = 39  # time at which STEP was written last
    LOSS_STEP = 40  # step of LOSS, from 1; written after it
    PERSIST_STEP = 41  # the script waits for a checkpoint of this step; 0: it does not
    MESSAGES = 42  # number of messages (send, recv) recorded so far
    MESSAGE_WAITED = 43  # number of the message that the rank waits for; 0: none
    WAITED_NS = 44  # total time in waits for messages and collectives that Python code has called
    WAITED_AT_STEP_NS = 45  # WAITED_NS at the end of STEP, written before it
    POOL_WAIT_NS = 46  # for which the training waited in the last capture through a pool
    MAY_STAY = 47  # inside a guarded loop: the process can be parked if another rank fails
    COMPILES = 48  # the first step has loaded torch's compiler
    LOOP = 49  # the epoch, and the number of loops entered in it; a process goes back within one


class CommandField(IntEnum):
    """Fields of the command page: agent and SMP -> workers."""

    COMMITTED_GENERATION = 0
    COMMITTED_STEP = 1
    STOP_AFTER_STEP = 2  # take a last snapshot at this boundary or the first after it, then wait
    COMMIT_COUNT = 3
    SNAPSHOT_EVERY = 4  # snapshot interval in steps if the profile says auto; 0: every step
    EVERY_FROM_STEP = 5  # SNAPSHOT_EVERY applies to steps after this one, so that all ranks agree
    ABANDONED_STEP = 6  # a rank has no seal of this step and never will: no commit
    COMMITTED_IN = 7  # generation of the last commit; after a restore no snapshot precedes it
    PROTECTING_STEP = 8  # sealed by all ranks of the node; being sent to other nodes
    TAKE_FROM = 9  # no snapshot before this step, equal on all ranks; -1: no leader decides
    LEASE_NS = 10  # no optimizer step after this time; 0: no limit, no other node can take over
    RETAINED_GENERATION = 11  # version committed before this generation; retained until
    RETAINED_STEP = 12  # the generation commits one; may be older than the restored version
    REPLICA_SHARES = 13  # number of the decision to share replicas; 0: none yet; -1: whole copies
    PROTECTED_GENERATION = 14  # newest version that survives the loss of any node
    PROTECTED_STEP = 15
    PERSISTED_GENERATION = 16  # newest version of which a checkpoint is complete
    PERSISTED_STEP = 17
    CAPTURE_FROM = 18  # one more snapshot, at the first possible boundary from this step; -1: none
    PERSIST_EVERY = 19  # multiples of this step get a snapshot too, for a checkpoint; 0: none
    POOLED = 20  # 1: ranks capture through pools, for requested checkpoints only


_NONE_YET = (
    CommandField.COMMITTED_GENERATION, CommandField.COMMITTED_STEP, CommandField.COMMITTED_IN,
    CommandField.RETAINED_GENERATION, CommandField.RETAINED_STEP, CommandField.ABANDONED_STEP,
    CommandField.PROTECTING_STEP, CommandField.TAKE_FROM, CommandField.CAPTURE_FROM,
    CommandField.PROTECTED_GENERATION, CommandField.PROTECTED_STEP,
    CommandField.PERSISTED_GENERATION, CommandField.PERSISTED_STEP,
)  # fmt: skip
"""Fields that are -1 on a new command page."""


class _Text:
    """A text of a page: a u16 length in bytes, then UTF-8. A longer text is cut."""

    def __init__(self, at: int, size: int) -> None:
        self._at = at
        self._size = size

    def __get__(self, page: "SharedPage", _owner: object) -> str:
        (length,) = struct.unpack_from("<H", page._map, self._at)
        at = self._at + 2
        return page._map[at : at + min(length, self._size - 2)].decode("utf-8", "replace")

    def __set__(self, page: "SharedPage", text: str) -> None:
        raw = text.encode()[: self._size - 2]
        page._map[self._at + 2 : self._at + 2 + len(raw)] = raw
        struct.pack_into("<H", page._map, self._at, len(raw))


class SharedPage:
    """One page of shared memory, accessed by field."""

    phase = _Text(2048, 64)
    note = _Text(2176, 1024)  # reason why no snapshots are taken, or another note for the operator
    slow_capture = _Text(_SLOW_CAPTURE_AT, _SLOW_CAPTURE_BYTES)
    """Why copies of devices are slower than they could be, and what to do; empty if they are not.
    It is written once."""
    stay_problem = _Text(_STAY_PROBLEM_AT, _STAY_PROBLEM_BYTES)
    """Why this process cannot stay if another rank fails; empty if it can."""
    not_protected = _Text(2176, 1024)
    """Of a command page: why this node's group does not protect versions; empty if it does."""
    not_persisted = _Text(_SLOW_CAPTURE_AT, _SLOW_CAPTURE_BYTES)
    """Of a command page: why the last checkpoint was not written; empty if it was."""
    backends = _Text(_BACKENDS_AT, _BACKENDS_BYTES)
    """Backends of this rank's groups, encoded by `ftrun.monitor.page_values`, as are `groups`."""
    groups = _Text(_GROUPS_AT, _GROUPS_BYTES)  # process groups of this rank
    _names = _Text(8192, 4096)

    def __init__(self, fd: int) -> None:
        self.rebind(fd)

    def rebind(self, fd: int) -> None:
        """Map another page in place of the present one, for all holders of this object."""
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self._words = memoryview(self._map).cast("q")
        self.message_memory = memoryview(self._map)[_MESSAGES_AT : _MESSAGES_AT + RING_BYTES]
        """For `ftrun.wire.shared_memory.message_ring`."""
        self._floats = memoryview(self._map).cast("d")

    def get(self, at: HeartbeatField | CommandField) -> int:
        return self._words[at]

    def set(self, at: HeartbeatField | CommandField, value: int) -> None:
        self._words[at] = value

    def add(self, at: HeartbeatField | CommandField, value: int) -> None:
        """Only for fields with one writer."""
        self._words[at] += value

    def version_at(self, generation_at: CommandField) -> tuple[int, int]:
        """The version whose step is in the next field."""
        return (self._words[generation_at], self._words[generation_at + 1])

    def show_version(self, generation_at: CommandField, shown: tuple[int, int]) -> None:
        """Show a version that is not older than the last one.

        The step is first: a reader that sees it with the old generation sees an older version.
        """
        self._words[generation_at + 1] = shown[1]
        self._words[generation_at] = shown[0]

    def show_levels(
        self, protected: tuple[int, int] | None, persisted: tuple[int, int] | None
    ) -> None:
        """Show the ranks the newest protected version, and the newest with a checkpoint."""
        if protected is not None:
            self.show_version(CommandField.PROTECTED_GENERATION, protected)
        if persisted is not None:
            self.show_version(CommandField.PERSISTED_GENERATION, persisted)

    @property
    def loss(self) -> float:
        return self._floats[HeartbeatField.LOSS]

    def set_loss(self, value: float, step: int) -> None:
        self._floats[HeartbeatField.LOSS] = value
        self._words[HeartbeatField.LOSS_STEP] = step

    def show_life(self, now_ns: int) -> None:
        """Progress without a step; before the first step there is no limit."""
        if self._words[HeartbeatField.FIRST_STEP_NS]:
            self._words[HeartbeatField.HEARTBEAT_NS] = now_ns

    def count_step(self, duration_ns: int) -> None:
        """Only for the one writer of the page."""
        self._words[_TIMES_AT + bucket_of(duration_ns)] += 1
        self._words[_NUM_TIMES_AT] += 1
        if self._words[_NUM_TIMES_AT] >= FORGET_AT:
            for at in range(_TIMES_AT, _NUM_TIMES_AT + 1):
                self._words[at] >>= 1

    def note_calls(self, step: int, calls: int) -> None:
        """Record the calls up to a step; multiples of 8, 64 and 512 steps have own entries."""
        for position, every in enumerate(_CALLS_EVERY):
            if step % every:
                break
            self._words[_CALLS_AT + 2 * position] = 0  # invalid until both words are written
            self._words[_CALLS_AT + 2 * position + 1] = calls
            self._words[_CALLS_AT + 2 * position] = step

    @property
    def calls_at_steps(self) -> list[tuple[int, int]]:
        """The newest step, and the newest multiples of 8, 64 and 512, each with its count."""
        found = []
        for position in range(len(_CALLS_EVERY)):
            at = _CALLS_AT + 2 * position
            step, calls = self._words[at], self._words[at + 1]
            if step and calls and step == self._words[at]:
                found.append((step, calls))
        return list(dict.fromkeys(found))

    @property
    def step_times(self) -> list[int]:
        return self._words[_TIMES_AT:_NUM_TIMES_AT].tolist()

    @property
    def may_capture(self) -> bool:
        """A device graph may be being captured; a query of any event would break the capture."""
        return self._words[HeartbeatField.CAPTURES] != _NO_CAPTURE

    def note_capture(self, *, is_in_progress: bool) -> None:
        self._words[HeartbeatField.CAPTURES] = _NO_CAPTURE + int(is_in_progress)

    @property
    def samples(self) -> tuple[str, ...]:
        """Names of the parameters of which boundary records have digests."""
        names = self._names
        return tuple(names.split("\n")) if names else ()

    @samples.setter
    def samples(self, names: Sequence[str]) -> None:
        """At most `MAX_SAMPLES`; removes all records. Only the end of a long name is kept."""
        num_bytes = NUM_RECORDS * _RECORD_BYTES
        self._map[_RECORDS_AT : _RECORDS_AT + num_bytes] = bytes(num_bytes)
        ends = (name.encode()[-MAX_SAMPLE_NAME_BYTES:].decode(errors="ignore") for name in names)
        self._names = "\n".join(ends)

    def write_record(self, step: int, loss: int | None, has_digest: int, digests: bytes) -> None:
        """Store the record of a boundary; a second call for the same step replaces it.

        If a kill or a concurrent reader meets a half-written record, its check does not match.
        `step` counts from 1. `loss` is the bits of the loss. Bit i of `has_digest` is set if
        `digests[i]` is valid: 4 bytes for each of at most `MAX_SAMPLES` parameters.
        """
        known = int(loss is not None)
        body = _RECORD.pack(0, known, has_digest, 0, step, loss or 0, digests)
        check = xxhash.xxh32_intdigest(body).to_bytes(_CHECK_BYTES, "little")
        at = _RECORDS_AT + step % NUM_RECORDS * _RECORD_BYTES
        self._map[at : at + _RECORD_BYTES] = check + body[_CHECK_BYTES:]

    def records(self) -> dict[int, BoundaryRecord]:
        found: dict[int, BoundaryRecord] = {}
        raw = self._map[_RECORDS_AT : _RECORDS_AT + NUM_RECORDS * _RECORD_BYTES]
        for at in range(0, len(raw), _RECORD_BYTES):
            check, known, has_digest, _, step, loss, digests = _RECORD.unpack_from(raw, at)
            if step == 0:
                continue
            body = bytes(_CHECK_BYTES) + raw[at + _CHECK_BYTES : at + _RECORD_BYTES]
            if xxhash.xxh32_intdigest(body) == check:
                found[step] = BoundaryRecord(loss if known else None, has_digest, digests)
        return found

    def messages(self) -> list[RecordedMessage]:
        """The newest messages between this rank and others, the oldest first."""
        newest = self._words[HeartbeatField.MESSAGES]
        if not newest:
            return []
        raw = bytes(self.message_memory)
        after = self._words[HeartbeatField.MESSAGES]
        return list(read_messages(raw, newest=newest, newest_after=after))


def create_page(name: str) -> int:
    fd = os.memfd_create(f"ftrun-{name}", os.MFD_CLOEXEC)
    os.ftruncate(fd, PAGE_BYTES)
    return fd


def create_command_page() -> int:
    fd = create_page("commands")
    page = SharedPage(fd)
    for one in _NONE_YET:
        page.set(one, -1)
    page.set(CommandField.STOP_AFTER_STEP, NEVER_STEP)
    return fd


CALLS_AT = 1 << 20
MAX_CALLS_BYTES = 16 << 20


def create_stack_file(name: str) -> int:
    return os.memfd_create(f"ftrun-stacks-{name}", os.MFD_CLOEXEC)


def leave_calls(fd: int, trace: bytes) -> None:
    with suppress(OSError):
        os.ftruncate(fd, CALLS_AT)  # an earlier trace may be longer
        os.pwrite(fd, trace[:MAX_CALLS_BYTES], CALLS_AT)


def left_calls(fd: int) -> bytes:
    try:
        return os.pread(fd, MAX_CALLS_BYTES, CALLS_AT)
    except OSError:
        return b""


def clear_stacks(fd: int) -> None:
    """Truncate the file and rewind it, because the rank shares the file position."""
    os.ftruncate(fd, 0)
    os.lseek(fd, 0, os.SEEK_SET)


def stacks(fd: int) -> str:
    with suppress(OSError):
        return os.pread(fd, CALLS_AT, 0).split(b"\0", 1)[0].decode("utf-8", "replace")
    return ""


# --- sums over the pages of all ranks -------------------------------------------------------------


def step_counts(pages: Sequence[SharedPage]) -> list[int]:
    return [sum(counts) for counts in zip(*(page.step_times for page in pages), strict=True)]


def most(pages: Sequence[SharedPage], at: HeartbeatField) -> int:
    """Maximum over the ranks, because all ranks take and skip the same snapshots."""
    return max((page.get(at) for page in pages), default=0)


def blocked_s(pages: Sequence[SharedPage]) -> float:
    """Of the slowest rank of this generation."""
    return most(pages, HeartbeatField.BLOCKED_NS) / 1e9


def loss_in(pages: Sequence[SharedPage]) -> float | None:
    return next((page.loss for page in pages if page.get(HeartbeatField.LOSS)), None)
