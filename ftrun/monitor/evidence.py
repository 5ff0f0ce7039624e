"""What can be seen of a rank from outside: the evidence that verdicts rest on.

Runs in:  agent (makes it, sends it, judges it). Pure.
Takes in: a heartbeat page, a flight recorder, /proc, a stack, taken at about one moment.
Gives:    a `RankView`, small enough to travel in a heartbeat.

Times are durations in seconds, never points of time: clocks of two nodes are not compared here.
"""

import msgspec

Frame = str
"""`/home/me/train.py:42 in train_one`."""

RUNTIME = ("/torch/", "/site-packages/", "/dist-packages/", "/lib/python3", "/ftrun/", "<frozen")
"""In a path: the frame is not of the user's own code."""

COMPUTES = 0.1
"""Cores; background threads of a script use less."""

_LIBRARIES = ("/torch/", "/site-packages/", "/dist-packages/")
"""What computes on the user's behalf; a busy loop of the user's own has none of it."""

_COMMUNICATION = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/_functional_coll")
_SAVING = (
    "/torch/serialization.py", "/torch/distributed/checkpoint/", "/safetensors/",
    "/ftrun/worker/capture/capture.py",
)  # fmt: skip
_COMPILING = ("/torch/_dynamo/", "/torch/_inductor/", "/torch/_functorch/", "/triton/")
_OUTSIDE = (
    "/subprocess.py", "/socket.py", "/ssl.py", "/http/client.py", "/urllib3/", "/requests/",
    "/multiprocessing/", "/selectors.py", "/asyncio/", "/boto", "/fsspec/", "/concurrent/futures/",
)  # fmt: skip
_HELD_UP = (*_COMMUNICATION, "/torch/autograd/", "/torch/cuda/streams.py", " in synchronize")
_LOADING = (
    "/torch/utils/data/",
    "/ftrun/worker/state/data_position.py",
    "/torchdata/",
    "/datasets/",
)


class CollectiveCall(msgspec.Struct, frozen=True):
    """One collective as a rank has called it."""

    seq: int
    """Counted by each process group, from 1."""
    op: str
    """`all_reduce`, without the name of the backend."""
    sizes: str = ""


class ProcessGroupView(msgspec.Struct, frozen=True):
    """One process group, as one of its ranks sees it."""

    name: str
    desc: str
    ranks: tuple[int, ...]
    """Empty where they are not known."""
    calls: tuple[CollectiveCall, ...]
    """The last few that this rank has entered, the newest last; empty: none yet."""
    waits_seq: int = 0
    """The oldest that it has entered and not left; 0: none."""
    waits_s: float = 0.0

    @property
    def entered(self) -> int:
        """The newest collective that this rank has entered; 0: none yet."""
        return self.calls[-1].seq if self.calls else 0

    def call(self, seq: int) -> CollectiveCall | None:
        return next((one for one in self.calls if one.seq == seq), None)


class RankView(msgspec.Struct, frozen=True):
    """One rank, at one look."""

    rank: int
    pid: int
    process: str
    """The kernel's letter: R, S, D, T; empty when it has ended."""
    step: int
    silent_s: float
    """Since the last step boundary."""
    phase: str = ""
    """What the script says it is doing; empty: training."""
    has_stepped: bool = True
    """It has made a step in this generation."""
    is_finished: bool = False
    """It has ended well."""
    cpu: float = 0.0
    """Cores used since the look before."""
    still_s: float = 0.0
    """For so long it has used no processor, read and written nothing, and its stack is the same."""
    spins_s: float = 0.0
    """For so long it has used a processor without leaving one function of the user's."""
    holds_gil: bool = False
    is_gil_known: bool = True
    """Its stack was read from outside, which also tells who holds the lock."""
    groups: tuple[ProcessGroupView, ...] = ()
    stack: tuple[Frame, ...] = ()
    """Of the main thread, the innermost frame first; empty where it could not be taken."""
    blocked_in: str = ""
    """The kernel function it sleeps in, where that can be read."""
    child: str = ""
    """A child that is stopped or hangs in the kernel, such as a DataLoader worker; in words."""

    @property
    def waiting(self) -> tuple[ProcessGroupView, ...]:
        """Groups in a collective of which it is."""
        return tuple(one for one in self.groups if one.waits_seq)

    @property
    def is_held_up(self) -> bool:
        """It is in a collective and waits for it; else it has one under way while it computes."""
        if not self.waiting or self.cpu < COMPUTES:
            return bool(self.waiting)
        return any(is_in(frame, _HELD_UP) for frame in self.stack)

    @property
    def has_said(self) -> bool:
        """The script has said that it does something else than train."""
        return self.phase not in ("", "train")

    @property
    def activity(self) -> str:
        """`eval`, `checkpoint`, `compile`, `data`, `outside` (another process, the network),
        `collective` or `train`: by its own word, or by its stack.
        """  # noqa: D205 - one sentence
        if self.has_said:
            return self.phase
        for frame in self.stack:
            if is_in(frame, _SAVING):
                return "checkpoint"
            if is_in(frame, _COMPILING):
                return "compile"
            if is_in(frame, _LOADING):
                return "data"
            if is_in(frame, _OUTSIDE):
                return "outside"
        if self.waiting or any(is_in(frame, _COMMUNICATION) for frame in self.stack):
            return "collective"
        return "train"

    @property
    def place(self) -> Frame:
        """The innermost frame of the user's own code, or the innermost of all."""
        own = (frame for frame in self.stack if not is_in(frame, RUNTIME))
        return next(own, self.stack[0] if self.stack else "")


def is_in(frame: Frame, parts: tuple[str, ...]) -> bool:
    """Whether the frame's file is one of these."""
    return any(part in frame for part in parts)


def own_functions(stack: tuple[Frame, ...]) -> tuple[str, ...]:
    """The user's function at work and its callers; empty while a library computes for it."""
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
    """File and function without the line."""
    path, _, function = frame.rpartition(" in ")
    return f"{path.rpartition(':')[0]} {function}"
