"""The position in data that are read ahead of the training.

Runs in:  worker, training thread.
Takes in: a DataLoader, plain or as accelerate wraps it.
Gives:    after a restart the batches that would have come, each with its old random numbers.

A framework asks for a batch before it has trained on the last one: accelerate one ahead, the
Trainer one whole accumulation, worker processes several batches. So a position is two numbers:
batches trained on, and batches asked for. After a restart the batches between the two are loaded
again, each from the random states that it was loaded from at first. Then the states of the
snapshot are put back, and whatever is asked for next finds what it would have found.

Asking is seen at the batch sampler, which every DataLoader over a data set with indices has. An
iterable data set is read again from its start.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ftrun.worker.state import determinism as rng
from ftrun.worker.state.data_position import DataPosition

_log = logging.getLogger(__name__)

_SAMPLERS = ("batch_sampler", "sampler")
_GENERATORS = ("generator", "synchronized_generator")


class PrefetchingPosition(DataPosition):
    """One loader, what has been asked of it, and what has been trained on."""

    def __init__(self, name: str, loader: Any, *, leaves_out: bool = True) -> None:
        """As `DataPosition`; `leaves_out` is false where the framework skips by itself."""
        super().__init__(name, loader)
        self._leaves_out = leaves_out
        self._base: Any = getattr(loader, "base_dataloader", loader)
        self._asked = 0
        self._before: dict[int, dict[str, Any]] = {}
        self._resumed: dict[str, Any] | None = None
        self._settled: Callable[[], None] | None = None
        self._has_pass = False
        self._watch()

    @property
    def is_indexed(self) -> bool:
        """Whether the data set has indices, so that batches can be left out without loading."""
        base = self._base
        return isinstance(base, DataLoader) and not isinstance(base.dataset, IterableDataset)

    @property
    def trained_on(self) -> int:
        """Batches of this pass that have been trained on."""
        return self._handed_out

    # --- what the framework does ---------------------------------------------------------------

    def begin_pass(self, settled: Callable[[], None], *, behind: int | None = None) -> None:
        """A pass begins, or what is left of one; the framework makes no iterator before this.

        Args:
            settled: called once, when the loader has come to where the snapshot was taken.
            behind: so many batches are left out by the framework, which counts by itself.
        """
        again, self._resume = self._resume, None
        self._settled = settled
        self._resumed = again
        if again is None:
            self._pass += self._has_begun
            self._handed_out = 0
            self._started_with = self._random_states()
        elif again["started_with"] is not None:
            self._put_back(again["started_with"])
        if again is not None and behind is not None:
            self._handed_out = behind
        self._has_begun = self._has_pass = True
        self._asked = self._handed_out
        self._before = {}

    def undo_first_draws(self) -> None:
        """In the first pass: what an iterator has drawn since the pass began does not count."""
        if self._pass == 0:
            self._put_back(self._begun_with)

    def settle(self) -> None:
        """The framework is about to train: whatever it has not asked for by now comes later."""
        self._resumed = None
        settled, self._settled = self._settled, None
        if settled is not None:
            settled()

    def trained(self, batches: int = 1) -> None:
        """So many more batches of this pass are done."""
        self._handed_out += batches
        self._before = {at: taken for at, taken in self._before.items() if at >= self._handed_out}

    def ask(self, index: int) -> bool:
        """A batch of this pass is about to be asked for; whether training still needs it."""
        if not self._has_pass:
            return True  # an evaluation, or a pass that the framework makes by itself
        if index == 0 and self._keeps_workers and self._pass > 0:
            # A new iterator draws a seed for its workers; one that has lasted would not have.
            rng.put_back(self._begun_with["rng"])
        if index < self._handed_out:
            return False
        if self._resumed is not None:
            self._go_back_to(index, self._resumed)
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
        self._has_begun = True

    def leave_out(self, count: int) -> None:
        if count:
            _log.warning(
                "numbers.policy is skip-data, and %d batches were to be left out; but the "
                "framework takes its batches by itself, so they come again",
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

    def _go_back_to(self, index: int, again: dict[str, Any]) -> None:
        if again.get("resized") or index >= again["asked"]:
            self.settle()
        elif index in again["before"]:
            rng.put_back(again["before"][index])

    def _watch(self) -> None:
        if self.is_indexed:
            inner = "sampler" if self._base.batch_sampler is None else "batch_sampler"
            # DataLoader refuses a plain assignment.
            self._base.__dict__[inner] = TrackedSampler(
                getattr(self._base, inner), self, leaves_out=self._leaves_out
            )

    def _generators(self) -> dict[str, torch.Generator]:
        """Every generator of the loader and of the samplers within it, by the way to it."""
        found: dict[str, torch.Generator] = {}
        waiting: list[tuple[str, Any]] = [("loader", self.loader), ("base", self._base)]
        seen: set[int] = set()
        while waiting:
            path, thing = waiting.pop()
            if thing is None or id(thing) in seen:
                continue
            seen.add(id(thing))
            for name in _GENERATORS:
                generator = getattr(thing, name, None)
                if isinstance(generator, torch.Generator):
                    found[f"{path}.{name}"] = generator
            waiting += [(f"{path}.{name}", getattr(thing, name, None)) for name in _SAMPLERS]
        return found


class TrackedSampler:
    """A sampler that tells its feed before it gives anything, and leaves out what is done."""

    def __init__(
        self, inner: Iterable[Any], feed: PrefetchingPosition, *, leaves_out: bool
    ) -> None:
        self.inner = inner
        self._feed = feed
        self._leaves_out = leaves_out

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        # Lazy, as torch's own: a DataLoader draws its base seed after it has called iter().
        batches = iter(self.inner)
        for index in count():
            is_needed = self._feed.ask(index)
            try:
                batch = next(batches)
            except StopIteration:
                return
            if is_needed or not self._leaves_out:
                yield batch
