"""The shards of a version, for workers of another world size to read.

Runs in:  the SMP, in the server's thread.
Takes in: the arenas, a worker's question.
Gives:    one read-only descriptor for each rank of the old world that has its shard here.

The arenas of the old world stay until the first version of the new one is committed; nobody
writes to them meanwhile, because workers of the new world have arenas of their own.
"""

import os

from ftrun.ids import Rank, version
from ftrun.smp.client import Requester
from ftrun.smp.memory.arenas import ArenaStore
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import worker as worker_messages

_READ_ONLY = os.O_RDONLY | os.O_CLOEXEC
MOST_IMAGES = 250
"""As many descriptors as one message carries, nearly."""


def open_images(memory: ArenaStore, asker: Requester, body: worker_messages.OpenShards) -> None:
    """Answer with what there is of the version; what is elsewhere is not in it."""
    wanted = version(body.generation, body.step)
    found: dict[Rank, int] = {}
    for arena in memory.all():
        if arena.shape.world_size == body.world_size and arena.holds(wanted):
            found[Rank(arena.shape.rank)] = arena.fd
    if len(found) > MOST_IMAGES:
        asker.tell(
            messages.Refused(f"{len(found)} shards on one node; {MOST_IMAGES} can be opened")
        )
        return
    fds: list[int] = []
    try:
        # Descriptions of the files of their own, so that they can be read-only.
        fds.extend(os.open(f"/proc/self/fd/{fd}", _READ_ONLY) for fd in found.values())
        asker.tell(worker_messages.ShardsOpened(list(found)), fds=tuple(fds))
    finally:
        for fd in fds:
            os.close(fd)
