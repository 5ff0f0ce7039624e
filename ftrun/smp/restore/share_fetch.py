"""Gets from other nodes what they have read of a checkpoint, and reads the rest from storage.

Runs in:  the SMP, in a thread of its own for the duration of the fetch.
Takes in: a `SharedLoad`, and the addresses of the nodes that load together.
Gives:    sealed arenas, or the reason of the failure.
Survives: the loss of any other node: what it does not deliver is read from storage.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ftrun.errors import FtrunError, SnapshotCorrupt
from ftrun.smp.checkpoint.shared_load import SharedLoad
from ftrun.smp.restore.asking import DownloadSession
from ftrun.smp.restore.downloader import PIECE, DownloadItem
from ftrun.smp.restore.rpc import FetchRpc
from ftrun.smp.waits import Steps
from ftrun.snapshot.load_shares import Place
from ftrun.wire.cluster import transfer as t
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages.smp import NodeAddress

PATIENCE_S = 60.0
"""Seconds for which another node may deliver nothing, because it may still be reading its share.

The wait ends earlier if the node is known to be unreachable.
"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShareEvents:
    """Callbacks, run in the thread that fetches.

    Args:
        done: everything is sealed; the number of bytes from other nodes.
        failed: the reason of the failure, and whether connections to nodes were lost.
        notice: what other nodes did not deliver.
    """

    done: Callable[[int], None]
    failed: Callable[[str, bool], None]
    notice: Callable[[str], None]


class Fetch:
    """Completes one load.

    Args:
        load: the load.
        nodes: addresses of all nodes that load, indexed by the reader numbers of the load.
        desk: sends requests to other nodes.
        events: the callbacks.
    """

    def __init__(
        self, load: SharedLoad, nodes: Sequence[NodeAddress], desk: FetchRpc, events: ShareEvents
    ) -> None:
        self._load = load
        self._nodes = nodes
        self._desk = desk
        self._events = events
        self._asking = DownloadSession(desk, patience_s=PATIENCE_S)

    def start(self) -> None:
        self._asking.begin("ftrun-share", self._run())

    def cancel(self) -> None:
        self._asking.cancel()

    # --- the fetch thread --- ----------------------------------------------------------------

    def _run(self) -> Steps[None]:
        try:
            with self._load.lock:  # a cancelled fetch may still be running
                if not self._load.is_whole:
                    yield from self._fill()
        except (FtrunError, OSError) as error:
            self._give_up(str(error))
        except Exception:  # noqa: BLE001
            # This is the main loop of a thread, so a bug must give an answer and not a hang.
            _log.exception("what others have read of a checkpoint ended in a bug of ftrun")
            self._give_up("a bug in ftrun; the SMP's log has it")
        else:
            if not self._asking.is_cancelled:
                self._events.done(self._asking.num_bytes)

    def _fill(self) -> Steps[None]:
        load = self._load
        self._desk.meet([place for place in self._nodes if place.smp_port > 0])
        wanted = {place: self._item(place, reader) for place, reader in load.left.items()}
        yield from self._asking.steps(list(wanted.values()), self._question)
        if self._asking.is_cancelled:
            return
        problems: list[str] = []
        for place, item in wanted.items():
            try:
                load.took(place)
            except SnapshotCorrupt as error:
                problems += item.problems or [str(error)]
        if load.left:
            said = "; ".join(dict.fromkeys(problems))
            self._events.notice(
                f"{len(load.left)} pieces of {load.version} that other nodes were to read are read "
                f"here: {said}"
            )
            load.read_too(list(load.left))
        crash_point("smp.checkpoint.share_taken")
        load.seal()

    def _item(self, place: Place, reader: int) -> DownloadItem:
        room, digest = self._load.room(place), self._load.digest(place)
        # The reader is unknown if the generation started with other nodes than those that loaded.
        sources = deque(node.node_id for node in self._nodes[reader : reader + 1])
        return DownloadItem(PIECE, digest, len(room), [room], sources, digest)

    def _question(self, number: int, batch: Sequence[DownloadItem]) -> t.GetPieces:
        at = self._load.version
        digests = b"".join(item.key.to_bytes(8, "little") for item in batch)
        return t.GetPieces(number, at.generation, at.step, 0, -1, digests=digests)

    def _give_up(self, why: str) -> None:
        if not self._asking.is_cancelled:
            # Storage delivers what no node does, so a lost connection is not the cause.
            self._events.failed(why, False)
