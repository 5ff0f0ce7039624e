"""Creates process groups without the other ranks, for a rank that sets up alone.

Runs in:  worker, training thread, from the start of the script to the first turn.
Gives:    `init_process_group` without a rendezvous; groups with the names, ranks and backend names
          that the script expects, whose collectives have no effect. `ProcessGroups.renew` connects
          them.

Source: torch 2.13, distributed_c10d.py.
"""

import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed import distributed_c10d

from ftrun.worker.survivors.groups import Created, Creation, ProcessGroups

c10d: Any = distributed_c10d


class LocalGroups:
    """While it is open, each group is created by this rank alone."""

    def __init__(self, groups: ProcessGroups) -> None:
        # Registers the backend `fake`.
        import torch.testing._internal.distributed.fake_pg  # noqa: F401

        self._groups = groups
        self._create_with_others = groups.create
        self._meet, self._barrier = c10d.rendezvous, c10d._store_based_barrier
        groups.create = self._create
        c10d.rendezvous = _meet_alone
        c10d._store_based_barrier = lambda *_, **__: None

    def close(self) -> None:
        self._groups.create = self._create_with_others
        c10d.rendezvous, c10d._store_based_barrier = self._meet, self._barrier

    def _create(self, given: Creation) -> Created:
        wanted = c10d.Backend(str(given["backend"]))
        config = c10d.BackendConfig(wanted)
        # Of the same devices, because torch chooses a device by those of the group.
        local = c10d.Backend(",".join(f"{one}:fake" for one in config.get_device_backend_map()))
        group, store = self._create_with_others(
            {**given, "backend": local, "backend_options": None}
        )
        if isinstance(group, dist.ProcessGroup):
            c10d._world.pg_map[group] = (wanted, store)
            c10d._world.pg_backend_config[group] = str(config)
        return group, store


def _meet_alone(
    url: str, rank: int = -1, world_size: int = -1, **_: Any
) -> Iterator[tuple[Store, int, int]]:
    """In place of torch's `rendezvous`: a store that no other rank uses."""
    rank = rank if rank >= 0 else int(os.environ["RANK"])
    yield HashStore(), rank, world_size if world_size > 0 else int(os.environ["WORLD_SIZE"])
