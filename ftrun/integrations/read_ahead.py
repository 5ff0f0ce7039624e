"""Tracks the position in data that a framework reads ahead of the training.

Runs in:  worker, training thread.
Gives:    after a restart the batches that would have come, each with its original random numbers.

A framework requests a batch before it has trained on the last one: accelerate reads one batch
ahead, the Trainer one whole accumulation, worker processes several batches. A position is therefore
two numbers: batches trained on, and batches requested. After a restart the batches between the two
are loaded again, each from the random states that it was first loaded from. Then the random states
of the snapshot are put back, so the next request finds the same states as without the restart.

Requests are observed at the batch sampler, which every DataLoader over a data set with indices has.
An iterable data set is read again from its start.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ftrun.worker.state import determinism as rng
from ftrun.worker.state.data_position import DataPosition, generators_within

_log = logging.getLogger(__name__)


class PrefetchingPosition(DataPosition):
    """Position of one loader: batches requested, and batches trained on."""

    def __init__(self, name: str, loader: Any, *, leaves_out: bool = True) -> None:
        """As `DataPosition`; `leaves_out` is false if the framework skips trained batches."""
        super().__init__(name, loader)
        self._base: Any = getattr(loader, "base_dataloader", loader)
        self._is_open = False
        """A pass has begun, and `end_pass` was not called since."""
        self._asked = 0
        self._before: dict[int, dict[str, Any]] = {}
        self._resumed: dict[str, Any] | None = None
        self._resolved: Callable[[], None] | None = None
        self._is_pass_awaited = False
        """A pass has begun, and no iterator of the sampler has started since."""
        if self.is_indexed:
            inner = "sampler" if self._base.batch_sampler is None else "batch_sampler"
            tracked = TrackedSampler(getattr(self._base, inner), self, leaves_out=leaves_out)
            self._base.__dict__[inner] = tracked  # DataLoader refuses a plain assignment

    @property
    def is_indexed(self) -> bool:
        """Whether the data set has indices, so that batches can be skipped without loading them."""
        base = self._base
        return isinstance(base, DataLoader) and not isinstance(base.dataset, IterableDataset)

    @property
    def trained_on(self) -> int:
        return self._handed_out

    # --- what the framework does ---------------------------------------------------------------

    def begin_pass(self, resolved: Callable[[], None], *, behind: int | None = None) -> None:
        """Begins a pass or continues a restored one, before the framework creates an iterator.

        `resolved` is called once, when the loader has reached the position of the snapshot.
        `behind`: number of batches that the framework itself skips, by its own count.
        """
        again, self._resume = self._resume, None
        self._resolved = resolved
        self._resumed = again
        if again is None:
            self._pass += self._is_open
            self._handed_out = 0
            self._started_with = self._random_states()
        elif again["started_with"] is not None:
            self._put_back(again["started_with"])
        if behind is not None:
            self._handed_out = behind
        self._has_started = self._is_pass_awaited = True
        self._asked = self._handed_out
        self._before = {}
        self._is_open = True

    def takes_iterator(self) -> bool:
        """Whether the sampler's iterator that starts now is that of the pass.

        It is the first one after `begin_pass`. Others are evaluations and loops of the script.
        """
        taken, self._is_pass_awaited = self._is_pass_awaited, False
        return taken

    def undo_first_draws(self) -> None:
        """In the first pass, puts back the random states that the pass began with."""
        if self._pass == 0:
            self._put_back(self._begun_with)

    def resolve(self) -> None:
        """Ends the catch-up, because the framework is about to train: all later batches are new."""
        self._resumed = None
        resolved, self._resolved = self._resolved, None
        if resolved is not None:
            resolved()

    def end_pass(self) -> None:
        """End the pass early, or after its last batch; the next one has the next number."""
        self._pass += self._is_open or self._handed_out > 0
        self._is_open = False
        super().end_pass()

    def trained(self) -> None:
        self._handed_out += 1
        self._before = {at: taken for at, taken in self._before.items() if at >= self._handed_out}

    def ask(self, index: int) -> bool:
        """Records the request of a batch of this pass; False if it was trained on before."""
        if index == 0 and self._keeps_workers and self._pass > 0:
            # A new iterator draws a seed for its workers; a persistent one would not have drawn it.
            rng.put_back(self._begun_with["rng"])
        if index < self._handed_out:
            return False
        if (again := self._resumed) is not None:
            if again.get("resized") or index >= again["asked"]:
                self.resolve()
            elif index in again["before"]:
                rng.put_back(again["before"][index])
        if self._base.num_workers == 0:
            self._before[index] = rng.take_all()
        self._asked = index + 1
        return True

    # --- snapshots -----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        if self._resume is not None:
            return self._resume
        return {**super().state(), "asked": self._asked, "before": dict(self._before)}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._has_started = True

    def leave_out(self, count: int) -> None:
        if count:
            _log.warning(
                "numerics.policy is skip-data, but the framework requests its batches by itself: "
                "%d batches are repeated, not skipped",
                count,
            )

    def warning(self) -> str | None:
        if not self.is_indexed:
            return f"{self.name} reads an iterable data set: a resume reads it again"
        if self._base.num_workers > 0:
            return (
                f"{self.name} has worker processes: batches come in the right order, and random "
                "augmentation in those processes is not repeated exactly"
            )
        return None

    # --- inside --------------------------------------------------------------------------------

    @property
    def _is_stateful(self) -> bool:
        return False  # accelerate's loaders have a state_dict that only works on request

    @property
    def _keeps_workers(self) -> bool:
        return bool(getattr(self._base, "persistent_workers", False))

    @property
    def _begun_with(self) -> dict[str, Any]:
        assert self._started_with is not None
        return self._started_with

    def _generators(self) -> dict[str, torch.Generator]:
        return generators_within([("loader", self.loader), ("base", self._base)])


class TrackedSampler:
    """Wraps a sampler: reports each request of a pass, and skips batches trained on before."""

    def __init__(
        self, inner: Iterable[Any], feed: PrefetchingPosition, *, leaves_out: bool
    ) -> None:
        self.inner = inner
        self._feed = feed
        self._leaves_out = leaves_out

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # during unpickling
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        # A generator, like torch's own: a DataLoader draws its base seed after it has called
        # iter().
        if not self._feed.takes_iterator():
            yield from self.inner
            return
        batches = iter(self.inner)
        for index in count():
            is_needed = self._feed.ask(index)
            try:
                batch = next(batches)
            except StopIteration:
                return
            if is_needed or not self._leaves_out:
                yield batch
