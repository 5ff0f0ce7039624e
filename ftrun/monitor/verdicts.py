"""Observations of a rank from outside, and verdicts: culprits, victims, evidence.

A `RankView` combines a heartbeat page, a flight recorder, /proc and a stack, read at about the same
time. Its times are durations in seconds, because the clocks of nodes are not compared.
"""

from collections.abc import Iterable, Mapping
from enum import Enum

import msgspec

from ftrun.events import ErrorLine


class VerdictKind(Enum):
    """Kinds of problems; docs/verdicts.md has a section for each."""

    CRASH = "crash"
    OUT_OF_MEMORY = "out of memory"
    NODE_LOST = "node lost"
    FROZEN = "frozen"
    HANG_IN_COMPUTATION = "hang in computation"
    HANG_IN_COMMUNICATION = "hang in communication"
    DEVICE_STUCK = "device stuck"
    SKIPPED_COLLECTIVE = "skipped collective"
    DEADLOCK = "deadlock"
    GIL_STUCK = "GIL stuck"
    BUSY_LOOP = "busy loop"
    INPUT_BOUND = "input-bound"
    SLOW_COMPUTATION = "slow computation"
    SLOW_COMMUNICATION = "slow communication"
    MEMORY_GROWTH = "memory growth"
    NUMERICAL_ANOMALY = "numerical anomaly"
    REPLICAS_DIFFER = "replicas differ"
    FAILING_NODE = "failing node"


class Confidence(Enum):
    """Confidence of a verdict."""

    CERTAIN = "certain"
    LIKELY = "likely"
    POSSIBLE = "possible"


class Verdict(msgspec.Struct, frozen=True):
    """One diagnosis."""

    kind: VerdictKind
    culprits: tuple[int, ...]
    """Ranks. Empty if the culprit is a node or a link, see `nodes`."""
    text: str
    """One sentence."""
    nodes: tuple[str, ...] = ()
    """Culprit nodes; for a link, both its ends."""
    victims: tuple[int, ...] = ()
    """Ranks that only wait for the culprits."""
    evidence: tuple[str, ...] = ()
    counter_evidence: tuple[str, ...] = ()
    """Facts that support another explanation."""
    confidence: Confidence = Confidence.LIKELY
    may_take_long: bool = False
    """The culprits are in a phase that may take long, as they report or as their stack shows."""
    act_immediately: bool = False
    """The evidence is positive: a longer wait would not change the diagnosis."""
    fingerprint: str = ""
    """Identifies a fault: equal for verdicts on the same fault at the same location."""
    error_class: str = ""
    """Of the lines that the culprit wrote: evidence, on which nothing depends; empty: none."""


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 1 and 2`, `ranks 0 to 6`, `12 ranks`."""
    found = sorted(ranks)
    if len(found) == 1:
        return f"rank {found[0]}"
    if len(found) > 2 and found[-1] - found[0] == len(found) - 1:
        return f"ranks {found[0]} to {found[-1]}"
    if len(found) <= 8:
        return f"ranks {', '.join(str(one) for one in found[:-1])} and {found[-1]}"
    return f"{len(found)} ranks"


def nodes_of(ranks: Iterable[int], node_of: Mapping[int, str]) -> tuple[str, ...]:
    """The nodes of these ranks, each once, in the order of the ranks."""
    return tuple(dict.fromkeys(node_of[rank] for rank in ranks if rank in node_of))


def group_text(name: str, desc: str) -> str:
    """A process group: `the default group`, `group dp`."""
    if desc in ("", "undefined"):
        return f"group {name}"
    return "the default group" if desc == "default_pg" else f"group {desc}"


def rank_on_node(rank: int, node_of: Mapping[int, str]) -> str:
    """`rank 3 on node0`."""
    return f"rank {rank} on {node_of[rank]}" if node_of.get(rank) else f"rank {rank}"


Frame = str
"""`/home/me/train.py:42 in train_one`."""

RUNTIME = ("/torch/", "/site-packages/", "/dist-packages/", "/lib/python3", "/ftrun/", "<frozen")
"""Path parts of frames that are not the user's code."""

COMPUTES = 0.1
"""Cores. A rank that uses this much counts as computing; background threads use less."""

_LIBRARIES = ("/torch/", "/site-packages/", "/dist-packages/")
"""Path parts of libraries that compute for the user; a busy loop has no such frame."""

_COMMUNICATION = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/_functional_coll",
                  "/ftrun/worker/process/message_record.py")  # fmt: skip
_ACTIVITIES = {
    "debugger": ("/pdb.py", "/bdb.py", "/debugpy/", "/IPython/"),
    "checkpoint": ("/torch/serialization.py", "/torch/distributed/checkpoint/", "/safetensors/",
                   "/ftrun/worker/capture/capture.py"),
    "compile": ("/torch/_dynamo/", "/torch/_inductor/", "/torch/_functorch/", "/triton/"),
    "data": ("/torch/utils/data/", "/ftrun/worker/state/data_position.py", "/torchdata/",
             "/datasets/"),
    "outside": (
        "/subprocess.py", "/socket.py", "/ssl.py", "/http/client.py", "/urllib3/", "/requests/",
        "/multiprocessing/", "/selectors.py", "/asyncio/", "/boto", "/fsspec/",
        "/concurrent/futures/", "/queue.py", "-packages/ray/", "-packages/grpc/",
        "-packages/filelock/", "-packages/nvidia/dali/",
    ),
}  # fmt: skip
"""By path parts of a frame; the first one that fits counts."""

_HELD_UP = (*_COMMUNICATION, "/torch/autograd/", "/torch/cuda/streams.py", " in synchronize")


class CollectiveCall(msgspec.Struct, frozen=True):
    """One collective call of a rank."""

    seq: int
    """Counted by each process group, from 1."""
    op: str
    """`all_reduce`, without the name of the backend."""
    sizes: str = ""


class OpenMessage(msgspec.Struct, frozen=True):
    """A send or receive call of a rank that is not over."""

    op: str
    """`send` or `recv`."""
    peer: int
    """The other rank."""
    seq: int = 0
    """Counted by each process group, for messages only; if `is_counted`, as in `MessageCount`."""
    waits_s: float = 0.0
    tag: int = 0
    is_counted: bool = False
    """The rank waits in it now, and `message_counts` of the ranks show whether it was answered."""


class MessageCount(msgspec.Struct, frozen=True):
    """Number of messages of one kind that a rank has called."""

    group: str
    op: str
    peer: int
    """-1: any rank, only for `recv`."""
    tag: int
    count: int


class ProcessGroupView(msgspec.Struct, frozen=True):
    """The state of a process group on one of its ranks."""

    name: str
    desc: str
    ranks: tuple[int, ...]
    """Empty if not known."""
    calls: tuple[CollectiveCall, ...]
    """The last collectives that this rank has entered, the newest last; empty: none yet."""
    waits_seq: int = 0
    """Oldest collective that this rank has entered but not left; 0: none."""
    waits_s: float = 0.0
    enqueued: int = 0
    """Number of the newest collective that the host has called; 0: the recorder has no count."""
    still_s: float = 0.0
    """Seconds in which no call of this group has begun or ended."""
    messages: tuple[OpenMessage, ...] = ()
    """The oldest open message of each kind and peer, the oldest first."""
    is_on_device: bool = False
    """The collectives run on a device, after the host has called them."""
    has_started: bool | None = None
    """The oldest open collective runs on the device; None: starts are not recorded."""
    left_s: float = 0.0
    """Seconds since the end of the newest completed collective was noticed; 0: not recorded."""

    @property
    def entered(self) -> int:
        """Newest collective that this rank has entered; 0: none yet."""
        return max(self.calls[-1].seq if self.calls else 0, self.enqueued)

    @property
    def completed(self) -> int:
        """All collectives up to this number are over; 0: none."""
        return self.waits_seq - 1 if self.waits_seq else self.entered

    @property
    def is_waiting(self) -> bool:
        return bool(self.waits_seq or self.messages)

    def call(self, seq: int) -> CollectiveCall | None:
        return next((one for one in self.calls if one.seq == seq), None)


class RankConnection(msgspec.Struct, frozen=True):
    """One TCP connection of a rank to another machine; counts start at its creation."""

    local: tuple[str, int]
    remote: tuple[str, int]
    stalled_s: float = 0.0
    """Seconds in which bytes were to be sent and none was acknowledged; 0: none waits."""
    acked_bytes: int = 0
    received_bytes: int = 0
    retransmits: int = 0
    """Segments sent again in `stalled_s`; 0: this node drops what it sends."""
    acked_s: float = -1.0
    """Seconds since a byte was acknowledged; -1: none was while it was observed."""


class RankView(msgspec.Struct, frozen=True):
    """One observation of one rank."""

    rank: int
    pid: int
    process: str
    """Process state letter of the kernel: R, S, D, T; empty if the process has ended."""
    step: int
    unresponsive_s: float
    """Seconds since the last step boundary."""
    phase: str = ""
    """Phase that the script reports; empty: training."""
    has_stepped: bool = True
    """The rank has made a step in this generation."""
    is_finished: bool = False
    """The rank has ended with success."""
    cpu: float = 0.0
    """Cores used since the previous observation."""
    still_s: float = 0.0
    """Seconds without CPU use, reads or writes, and with an unchanged stack."""
    spins_s: float = 0.0
    """Seconds in which it has used a CPU within one function of the user's code."""
    unmoved_s: float = 0.0
    """Seconds with an unchanged stack of the main thread, with or without CPU use."""
    holds_gil: bool = False
    is_gil_known: bool = True
    """The stack was read from outside, which also shows the holder of the GIL."""
    groups: tuple[ProcessGroupView, ...] = ()
    is_recorder_complete: bool = True
    """False: `groups` may lack groups and messages, so their absence proves nothing."""
    recorder_notes: tuple[str, ...] = ()
    """Why `groups` is missing or incomplete; each continues "rank 3: "."""
    stack: tuple[Frame, ...] = ()
    """Stack of the main thread, the innermost frame first; empty if it could not be read."""
    blocked_in: str = ""
    """Kernel function in which the process sleeps; empty if it cannot be read."""
    child: str = ""
    """Describes a child process that is stopped or hangs in the kernel, such as a DataLoader
    worker."""
    connections: tuple[RankConnection, ...] = ()
    """To other machines, the longest stalled first; of many connections only a part."""
    errors: tuple[ErrorLine, ...] = ()
    """Error classes in its logs, read once in a hang."""
    message_counts: tuple[MessageCount, ...] = ()
    """Of messages that no flight recorder has; of many only the newest kinds."""
    left_order: str = ""
    """How its messages differ from those of its earlier steps; empty: they do not."""

    @property
    def from_dump(self) -> str:
        """Empty: it was observed. See `DumpedRankView`."""
        return ""

    @property
    def waiting(self) -> tuple[ProcessGroupView, ...]:
        return tuple(one for one in self.groups if one.is_waiting)

    @property
    def is_held_up(self) -> bool:
        """Whether the rank waits for a collective.

        If a rank computes while a collective is pending, it waits only if its stack shows that.
        """
        if not self.waiting or self.cpu < COMPUTES:
            return bool(self.waiting)
        return any(is_in(frame, _HELD_UP) for frame in self.stack)

    @property
    def has_reported(self) -> bool:
        return self.phase not in ("", "train")

    @property
    def activity(self) -> str:
        """`eval`, `checkpoint`, `compile`, `data`, `debugger`, `outside` (another process, the
        network), `collective` or `train`: as the script reports, else as the stack shows.
        """  # noqa: D205 - one sentence
        if self.has_reported:
            return self.phase
        for frame in self.stack:
            for activity, parts in _ACTIVITIES.items():
                if is_in(frame, parts):
                    return activity
        if self.waiting or any(is_in(frame, _COMMUNICATION) for frame in self.stack):
            return "collective"
        return "train"

    @property
    def place(self) -> Frame:
        """Innermost frame of the user's code; else the innermost frame."""
        own = (frame for frame in self.stack if not is_in(frame, RUNTIME))
        return next(own, self.stack[0] if self.stack else "")


class DumpedRankView(RankView, frozen=True):
    """A rank of which nothing is known but a dump of its recorder."""

    state: str = ""
    """What is known, such as "has no dump"; continues "rank 3 "."""

    @property
    def from_dump(self) -> str:
        return self.state


def is_in(frame: Frame, parts: tuple[str, ...]) -> bool:
    return any(part in frame for part in parts)


def own_functions(stack: tuple[Frame, ...]) -> tuple[str, ...]:
    """Active function of the user's code and its callers; empty while a library computes for it."""
    for index, frame in enumerate(stack):
        if is_in(frame, _LIBRARIES):
            return ()
        if not is_in(frame, RUNTIME):
            return tuple(function_of(one) for one in stack[index:])
    return ()


def short(frame: Frame) -> str:
    """A frame without its folders: `train.py:42 in train_one`."""
    path, middle, function = frame.partition(" in ")
    return path.rpartition("/")[2] + middle + function


def function_of(frame: Frame) -> str:
    path, _, function = frame.rpartition(" in ")
    return f"{path.rpartition(':')[0]} {function}"
