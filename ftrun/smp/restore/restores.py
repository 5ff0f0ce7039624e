"""Restores a version for local ranks that have no slot of it, and answers waiting workers.

Runs in:  the SMP, in the server thread; the fetch has a thread of its own, see `lost_ranks.py`.
Takes in: the version that a generation starts from, and the nodes that have it.
Gives:    ArenaGranted, RestoreReady or RestoreFailed to the agent; arenas to waiting workers.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ftrun import clock
from ftrun.ids import Generation, Rank, Version
from ftrun.smp.checkpoint.service import check_available
from ftrun.smp.checkpoint.shared_load import SharedLoad
from ftrun.smp.client import Requester
from ftrun.smp.jobs import JobLanes
from ftrun.smp.memory.arena_requests import granted
from ftrun.smp.memory.arenas import ArenaStore
from ftrun.smp.restore.fetch import SHARE_TIMEOUT_S, Fetch, SharedPieces
from ftrun.smp.restore.lost_ranks import FetchJob, LostRanks
from ftrun.smp.restore.rpc import FetchRpc
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages

SendToAgent = Callable[..., None]
_log = logging.getLogger(__name__)


@dataclass
class _Restore:
    """The restore of one generation."""

    wanted: Version
    generation: Generation
    ranks: Sequence[Rank]
    world_size: int
    groups: Sequence[smp_messages.PreviousGroup]
    missing: set[Rank] = field(default_factory=set)
    fetch: Fetch | None = None
    failed: str = ""
    started_s: float = 0.0


class RestoreCoordinator:
    """Runs one restore at a time; `here` is called when all local ranks have the version."""

    def __init__(
        self,
        memory: ArenaStore,
        rpc: FetchRpc,
        jobs: JobLanes,
        *,
        send_to_agent: SendToAgent,
        here: Callable[[], None],
        lost_ranks: type[LostRanks] = LostRanks,
    ) -> None:
        self._memory = memory
        self._rpc = rpc
        self._jobs = jobs
        self._send_to_agent = send_to_agent
        self._here = here
        self._lost_ranks = lost_ranks
        self._restore: _Restore | None = None
        self._load: SharedLoad | None = None
        self._waiting: list[tuple[Requester, Rank, Version]] = []

    def share(self, load: SharedLoad | None) -> None:
        """Set the load whose remaining pieces come from other nodes; None if there is none."""
        if self._load is not None and not self._load.is_whole:
            self.cancel()
            self._load.close()
        self._load = load

    def share_of(self, wanted: Version | None) -> SharedLoad | None:
        load = self._load
        return load if load is not None and load.version == wanted else None

    def begin(
        self,
        body: smp_messages.BeginGeneration,
        wanted: Version | None,
        own: smp_messages.NodeAddress | None,
    ) -> None:
        """Fetch what the local ranks lack of this version; a running equal restore continues."""
        if self._is_under_way(body, wanted):
            return
        self.cancel()
        self._refuse(
            lambda waited: waited != wanted, "a new generation starts from another version"
        )
        if wanted is None:
            return
        restore = _Restore(
            wanted,
            Generation(body.generation),
            _ranks_of(body),
            body.world_size,
            body.restore_from,
            started_s=clock.now_s(),
        )
        restore.missing = self._missing(restore)
        self._restore = restore
        load = self.share_of(wanted)
        if load is not None and not load.is_whole:
            self._complete(restore, load, body)
            return
        if not restore.missing:
            self._ready(restore)
            return
        if own is None or not body.restore_from:
            # The agent may still deliver an arena, or start the worker from another version.
            if body.group:
                self._fail(restore, f"no node is known from which {wanted} can be fetched")
            return
        self._fetch(restore, body, own)

    def _fetch(
        self, restore: _Restore, body: smp_messages.BeginGeneration, own: smp_messages.NodeAddress
    ) -> None:
        fetch = restore.fetch = Fetch(self._rpc, timeout_s=body.timeout_s)
        job = FetchJob(
            wanted=restore.wanted,
            ranks=sorted(restore.missing),
            groups=body.restore_from,
            world_size=body.world_size,
            own=own,
            check=check_available,
            notice=self._notice,
        )
        fetch.start(
            "ftrun-fetch",
            self._lost_ranks(job, fetch).steps(),
            done=lambda fds: self._jobs.post(partial(self._fetched, restore, fds, fetch.num_bytes)),
            failed=lambda reason: self._jobs.post(
                partial(self._fail, restore, reason, is_link=fetch.has_lost)
            ),
        )

    def _complete(
        self, restore: _Restore, load: SharedLoad, body: smp_messages.BeginGeneration
    ) -> None:
        groups = body.restore_from or body.read_from
        pieces = SharedPieces(load, groups[0].nodes if groups else [], self._notice)
        restore.missing.update(load.ranks)
        fetch = restore.fetch = Fetch(self._rpc, timeout_s=SHARE_TIMEOUT_S)
        fetch.start(
            "ftrun-share",
            pieces.steps(fetch),
            done=lambda _: self._jobs.post(
                partial(self._completed, restore, load, fetch.num_bytes)
            ),
            # Storage delivers what no node does, so a lost connection is not the cause.
            failed=lambda reason: self._jobs.post(partial(self._fail, restore, reason)),
        )

    def _notice(self, reason: str) -> None:
        """Report data that was rejected or not delivered; callable from any thread."""
        notice = smp_messages.SmpNotice("source_set_aside", reason)
        self._jobs.post(partial(self._send_to_agent, notice))

    def _completed(self, restore: _Restore, load: SharedLoad, num_bytes: int) -> None:
        if restore is self._restore:
            text = f"{load.num_read} bytes read and {num_bytes} received from other nodes"
            self._all_arrived(restore, text)

    def _is_under_way(self, body: smp_messages.BeginGeneration, wanted: Version | None) -> bool:
        restore = self._restore
        return (
            restore is not None
            and restore.fetch is not None
            and not restore.failed
            and (restore.wanted, restore.generation) == (wanted, body.generation)
            and restore.ranks == _ranks_of(body)
            and restore.groups == body.restore_from
        )

    def cancel(self) -> None:
        if self._restore is not None and self._restore.fetch is not None:
            self._restore.fetch.cancel()
        self._restore = None

    def stop(self) -> None:
        self.cancel()
        self._refuse(lambda _: True, "the SMP ends")

    def grant(self, requester: Requester, rank: Rank, wanted: Version) -> None:
        arena = next((one for one in self._memory.of(rank) if one.holds(wanted)), None)
        restore = self._restore
        if arena is not None:
            requester.send(granted(arena.shape), fds=(arena.fd,))
        elif restore is None or restore.wanted != wanted or rank not in restore.missing:
            reason = f"{wanted} of rank {rank} is not on this node and is not being fetched"
            requester.send(messages.Refused(reason))
        elif restore.failed:
            requester.send(messages.Refused(restore.failed))
        else:
            self._waiting.append((requester, rank, wanted))

    def recheck(self) -> None:
        """Check the missing ranks again, because arenas have arrived from the agent."""
        restore = self._restore
        if restore is not None and restore.missing and restore.fetch is None:
            restore.missing = self._missing(restore)
            if not restore.missing:
                self._ready(restore)

    def _fetched(self, restore: _Restore, fds: Mapping[Rank, int], num_bytes: int) -> None:
        if restore is not self._restore:
            for fd in fds.values():
                self._memory.discard(fd)
            return
        for _, fd in sorted(fds.items()):
            arena = self._memory.add(fd, restore.generation)
            self._send_to_agent(granted(arena.shape), fds=(fd,))
            crash_point("smp.fetch.agent_notified")
        self._all_arrived(restore, f"fetched {num_bytes} bytes")

    def _all_arrived(self, restore: _Restore, what: str) -> None:
        text = f"{restore.wanted}: {what} in {clock.now_s() - restore.started_s:.3f} s"
        self._send_to_agent(smp_messages.SmpNotice("restore", text))
        restore.missing.clear()
        self._ready(restore)

    def _ready(self, restore: _Restore) -> None:
        self._send_to_agent(
            smp_messages.RestoreReady(restore.wanted.generation, restore.wanted.step)
        )
        waiting, self._waiting = self._waiting, []
        for requester, rank, wanted in waiting:
            self.grant(requester, rank, wanted)
        self._here()

    def _fail(self, restore: _Restore, reason: str, *, is_link: bool = False) -> None:
        if restore is not self._restore:
            return
        restore.failed = reason
        _log.warning("%s", reason)
        self._send_to_agent(smp_messages.RestoreFailed(restore.generation, reason, is_link))
        self._refuse(lambda _: True, reason)

    def _refuse(self, chosen: Callable[[Version], bool], reason: str) -> None:
        waiting, self._waiting = self._waiting, []
        for requester, rank, wanted in waiting:
            if chosen(wanted):
                text = f"{wanted} of rank {rank} is not available: {reason}"
                requester.send(messages.Refused(text))
            else:
                self._waiting.append((requester, rank, wanted))

    def _missing(self, restore: _Restore) -> set[Rank]:
        held = self._memory.held(restore.world_size)
        return {rank for rank in restore.ranks if restore.wanted not in held.get(rank, ())}


def _ranks_of(body: smp_messages.BeginGeneration) -> list[Rank]:
    """Ranks whose shards must be here; those of another world size are read in place."""
    if body.restored_world_size not in (0, body.world_size):
        return []
    return [Rank(rank) for rank in body.local_ranks]
