"""Opens the shards of a version for workers of another world size.

Runs in:  the SMP, in the server thread.
Takes in: the arenas, and a worker's request.
Gives:    one read-only descriptor for each rank of the previous world whose shard is on this node.

The arenas of the previous world stay until the first version of the new world is committed. No
process writes to them until then, because workers of the new world have arenas of their own.
"""

import os

from ftrun.ids import Rank, version
from ftrun.smp.client import Requester
from ftrun.smp.memory.arenas import ArenaStore
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import worker as worker_messages

_READ_ONLY = os.O_RDONLY | os.O_CLOEXEC
MOST_IMAGES = 250
"""Slightly below the number of descriptors that one message can carry."""


def open_images(memory: ArenaStore, asker: Requester, body: worker_messages.OpenShards) -> None:
    """Answer with the shards of the version on this node; shards on other nodes are left out."""
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
        # Opening the files again gives file descriptions of their own, which can be read-only.
        fds.extend(os.open(f"/proc/self/fd/{fd}", _READ_ONLY) for fd in found.values())
        asker.tell(worker_messages.ShardsOpened(list(found)), fds=tuple(fds))
    finally:
        for fd in fds:
            os.close(fd)
