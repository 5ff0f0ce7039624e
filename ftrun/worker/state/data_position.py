"""The position of a loader in its data, and how to resume from it.

Runs in:  worker, training thread.

A StatefulDataLoader stores its position itself. For a plain DataLoader, the snapshot holds the
random states at the start of the pass. A restore sets these states, recreates the iterator of the
loader, and draws the indices of the used batches from the sampler without loading these batches.
The result is the same order of indices without reading a sample. An iterable data set has no
indices to skip, so its batches are loaded and dropped. This also applies to a DataLoader with its
own `__iter__`, which may draw its indices at any time.

Between two passes, only the next pass matters. It begins as in the undisturbed run, and makes the
same random draws.

A process that stays when another rank fails goes back too, by `rewind`. Inside a pass, the batches
that the restored version has not seen are handed out again (survivors/replay.py), and the iterator
continues behind them. Else the position is restored as in a new process, at the next batch.
"""

import copy
import gc
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ftrun.worker.state import determinism as rng
from ftrun.worker.state.module_state import given_by
from ftrun.worker.survivors.replay import KeptBatch, KeptBatches, handed_out_again

_SAMPLERS = ("batch_sampler", "sampler")
_GENERATORS = ("generator", "synchronized_generator")
_OLD_NAMES = {"loader.generator": "loader", "loader.sampler.generator": "sampler"}
"""Names of generators in snapshots of version 0.2."""
_TURNS_BY_HAND = 2
_END = object()

_log = logging.getLogger(__name__)


class DataPosition:
    """A loader, and the position in its data."""

    def __init__(self, name: str, loader: Any) -> None:
        self.name = name
        self.loader = loader
        self._pass = 0
        self._handed_out = 0
        self._started_with: dict[str, Any] | None = None
        self._iterations = 0
        self._has_started = False
        self._began_with_workers = False
        """Persistent workers existed when this pass began, so no seed was drawn for them."""
        self._clone: Any = None
        self._resume: dict[str, Any] | None = None
        self._generators_now: dict[str, Any] = {}
        self._to_leave_out = 0
        self._in_use: dict[weakref.ref[_BaseDataLoaderIter], int] = {}
        """Iterators created by the script, with the number of batches that each has yielded."""
        self._turns_in_use = 0
        self._kept: KeptBatches | None = None
        self._again_now: deque[KeptBatch] = deque()
        """Batches to hand out again before the iterator continues."""
        self._generators_then: dict[str, Any] | None = None
        """States of the generators at this position, if the iterator is ahead of it."""
        self._is_running = False

    def state(self) -> dict[str, Any]:
        """The position as plain values, with the loader's own state_dict."""
        if self._resume is not None and not self._has_own_position:
            # No batch was taken since the restore.
            return {**self._resume, "generators": self._generator_states()}
        own = given_by(self.loader.state_dict, self.name) if self._has_own_position else None
        return {
            "pass": self._pass,
            "handed_out": self._handed_out,
            "started_with": self._started_with,
            "had_workers": self._began_with_workers if self._handed_out else self._has_workers,
            "own": own,
            "generators": self._generator_states(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._pass = state["pass"]
        self._handed_out = state["handed_out"]
        self._started_with = state["started_with"]
        self._resume = state
        self._generators_now = state.get("generators", {})  # version 0.2 has none
        self.put_back_generators()
        if state["own"] is not None and self._is_stateful:
            self.loader.load_state_dict(state["own"])

    def put_back_generators(self) -> None:
        self._set_generators(self._generators_now)

    def keep_batches(self, step: Callable[[], int], others: set[int]) -> None:
        """Keep batches for `rewind`, unless the iterator cannot continue behind them.

        `step` returns the number of step boundaries so far. `others`: ids of generators that a
        restore sets to earlier states.
        """
        shared = others.intersection(map(id, self._generators().values()))
        if not self._is_stateful and not shared:
            self._kept = KeptBatches(step)

    @property
    def can_rewind(self) -> bool:
        """Whether a running loop can go back without communication of its loader.

        A subclass here, or of DataLoader, has an iteration of its own: Accelerate's loaders send
        random states when they are iterated, and read ahead.
        """
        is_subclass = isinstance(self.loader, DataLoader) and not self._is_stateful
        has_own = is_subclass and type(self.loader).__iter__ is not DataLoader.__iter__
        return type(self).batches is DataPosition.batches and not has_own

    def forget_before(self, step: int) -> None:
        """Release kept batches of earlier turns: `rewind` goes back to this step at most."""
        if self._kept is not None:
            self._kept.forget_before(step)

    def rewind(self, state: dict[str, Any], step: int) -> None:
        """Go back to the position after this step, in the process that has made it."""
        is_live = self._kept is not None and self._is_running and self._resume is None
        again = self._kept.since(step) if is_live and self._kept is not None else None
        # The iterator must continue behind the last of these batches.
        before = again[0].number - 1 if again else self._handed_out
        ahead = (state["pass"], state["handed_out"])
        if again is not None and ahead == (self._pass, before):
            self._again_now = deque(again)
            self._handed_out = state["handed_out"]
            self._generators_then = state["generators"]
            return
        self._again_now.clear()
        self._generators_then = None
        self.load_state(state)

    def pause(self) -> None:
        """Make the next iteration continue this pass, as after a restore."""
        self.load_state(self.state())

    def end_pass(self) -> None:
        self._resume = None
        self._handed_out = 0
        self._started_with = None

    def leave_out(self, count: int) -> None:
        """Load the next `count` batches without yielding them, across passes."""
        self._to_leave_out = count

    def warning(self) -> str | None:
        """The reason why this loader cannot resume exactly, with the remedy; None if it can."""
        if self._is_stateful or not isinstance(self.loader, DataLoader):
            return None
        remedy = "use torchdata's StatefulDataLoader for an exact resume"
        if isinstance(self.loader.dataset, IterableDataset):
            return f"{self.name} reads an iterable data set: a resume reads it again; {remedy}"
        if self.loader.num_workers > 0:
            return (
                f"{self.name} has worker processes, whose random augmentation a resume does not "
                f"repeat exactly; {remedy}"
            )
        return None

    def batches(
        self, epoch: int | None, after_start: Callable[[], None], *, ends_if_left: bool = False
    ) -> Iterator[Any]:
        """Yield the batches of one pass, or of the rest of a restored pass.

        Args:
            epoch: epoch for the sampler; None: use the number of passes.
            after_start: called before the first batch is loaded; it may restore random states.
            ends_if_left: if the iteration is left early, the pass is over.
        """
        self._iterations += 1
        iteration = self._iterations
        iterator = self._begin_pass(epoch, after_start)
        try:
            while (batch := self._next(iterator)) is not _END:
                if self._to_leave_out > 0:
                    self._to_leave_out -= 1
                    continue
                yield batch
                if self._resume is not None:  # after `rewind`
                    iterator = self._restart(epoch)
        except GeneratorExit:
            if ends_if_left and iteration == self._iterations and self._resume is None:
                self.end_pass()
            raise
        finally:
            self._is_running &= iteration != self._iterations
        self._pass += 1
        self._handed_out = 0
        self._started_with = None

    def _begin_pass(self, epoch: int | None, after_start: Callable[[], None]) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        self._set_epoch(self._pass if epoch is None else epoch)
        if resume is None or not resume["handed_out"]:
            after_start()  # before the first random draw of the pass
            iterator = self._new_pass(resume)
            self._has_started = True
        else:
            # Inside `steps()` the loop has already begun, so the random states must not change.
            # Other code may also use these generators.
            now = self._random_states()
            iterator = self._again(resume)
            self._put_back(now)
            self._has_started = True
            after_start()
        self._is_running = True
        if self._kept is not None:
            self._kept.begin_pass()
        return iterator

    def _restart(self, epoch: int | None) -> Iterator[Any]:
        """The iterator of a restored position, in place of one that the script still uses."""
        self._clone = None
        if self._keeps_workers and not self._is_stateful:
            self.loader.__dict__["_iterator"] = None  # ends its workers, which have read ahead
        return self._begin_pass(epoch, self.put_back_generators)

    def _next(self, iterator: Iterator[Any]) -> Any:
        """The next batch of the pass; `_END` if there is none."""
        if self._again_now:
            kept = self._again_now.popleft()
            rng.put_back(kept.states["rng"])
            self._generators_then = kept.states["generators"]
            self._handed_out = kept.number
            return handed_out_again(kept)
        self._generators_then = None
        batch = next(iterator, _END)
        if batch is not _END:
            self._handed_out += 1
            if self._kept is not None:
                self._kept.add(batch, self._handed_out, self._random_states())
        return batch

    @property
    def index(self) -> int:
        return self._handed_out - 1

    @property
    def is_at_end(self) -> bool:
        """Whether the last yielded batch ends its pass; False if the length is unknown."""
        try:
            return self._handed_out >= len(self.loader)
        except TypeError:  # an iterable data set
            return False

    @property
    def num_left(self) -> int:
        """Batches left in the pass that `batches` begins or continues; 0 if that is unknown."""
        try:
            return max(0, len(self.loader) - self._handed_out)
        except TypeError:  # an iterable data set
            return 0

    @property
    def is_followed(self) -> bool:
        """Whether the position is known: `batches` was used, or the loader has a state_dict."""
        return self._has_started or self._has_own_position

    def is_by_hand(self, boundaries: int) -> bool:
        """Whether the script takes a batch directly from a DataLoader in each of two turns.

        The search for iterators visits all objects of the process, which is slow. It therefore runs
        only at boundaries 2, 4, 8, 16 and so on; the method is called at each boundary.
        """
        if self._turns_in_use < _TURNS_BY_HAND and isinstance(self.loader, DataLoader):
            given = {iterator: _given_by(iterator) for iterator in self._in_use}
            self._in_use = {it: now for it, now in given.items() if now > self._in_use[it]}
            self._turns_in_use = self._turns_in_use + 1 if self._in_use else 0
            if self._turns_in_use < _TURNS_BY_HAND and boundaries & (boundaries - 1) == 0:
                self._in_use, self._turns_in_use = _iterators_of(self.loader), 0
        return self._turns_in_use >= _TURNS_BY_HAND

    @property
    def _has_own_position(self) -> bool:
        # A state_dict() before the first iteration may begin one, as in torchdata's loaders.
        if not self._is_stateful:
            return False
        if hasattr(self.loader, "_iterator"):
            return self.loader._iterator is not None
        return self._has_started

    @property
    def _is_stateful(self) -> bool:
        return hasattr(self.loader, "state_dict") and hasattr(self.loader, "load_state_dict")

    @property
    def _is_indexed(self) -> bool:
        loader = self.loader
        if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
            return False
        return not isinstance(loader.dataset, IterableDataset)

    @property
    def _keeps_workers(self) -> bool:
        return bool(getattr(self.loader, "persistent_workers", False))

    @property
    def _has_workers(self) -> bool:
        return self._has_started and self._keeps_workers

    def _new_pass(self, restored: dict[str, Any] | None) -> Iterator[Any]:
        had_workers = self._has_workers if restored is None else restored["had_workers"]
        self._began_with_workers = had_workers
        self._handed_out = 0
        if self._is_stateful:
            self._started_with = None
            if restored is not None and restored["own"] is not None:
                self._end_own_pass()
            return self._iterator_over(self.loader)
        began = self._started_with = self._random_states()
        if restored is None or not had_workers:
            return self._iterator_over(self.loader if self._clone is None else self._clone)
        # The workers are started again, but no seed is drawn for them.
        if self._is_indexed:
            return self._skipping(0, began)
        iterator = self._iterator_over(self.loader)
        self._put_back(began)
        return iterator

    def _end_own_pass(self) -> None:
        """Make a torchdata loader apply its restored state, which is of the previous pass."""
        if hasattr(self.loader, "_iterator"):
            now = self._random_states()
            self._iterator_over(self.loader)
            self._put_back(now)

    def _again(self, resume: dict[str, Any]) -> Iterator[Any]:
        self._began_with_workers = resume["had_workers"]
        if self._is_stateful or resume["started_with"] is None:
            iterator = self._iterator_over(self.loader)
            # The loader's state is that of one rank in a world of another size.
            for _ in range(resume["handed_out"] if resume.get("resized") else 0):
                next(iterator, None)
            return iterator
        self._put_back(resume["started_with"])
        to_skip = resume["handed_out"]
        if self._is_indexed:
            restart = resume["started_with"] if resume["had_workers"] else None
            return self._skipping(to_skip, restart)
        iterator = self._iterator_over(self.loader)
        for _ in range(to_skip):
            next(iterator, None)
        return iterator

    def _skipping(self, to_skip: int, restart: dict[str, Any] | None) -> Iterator[Any]:
        loader = self.loader
        clone = copy.copy(loader)
        inner = "sampler" if loader.batch_sampler is None else "batch_sampler"
        put_back = None if restart is None else (lambda: self._put_back(restart))
        skipping = _SkippingSampler(getattr(loader, inner), to_skip, put_back)
        clone.__dict__[inner] = skipping  # DataLoader refuses a plain assignment
        clone.__dict__["_iterator"] = None
        if self._keeps_workers and loader.num_workers > 0:
            self._clone = clone  # owns the persistent workers
        iterator = self._iterator_over(clone)
        skipping.skip()
        return iterator

    @staticmethod
    def _iterator_over(loader: Iterable[Any]) -> Iterator[Any]:
        return iter(loader)

    def _set_epoch(self, epoch: int) -> None:
        sampler = getattr(self.loader, "sampler", None)
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        for one in (sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
            if callable(set_epoch := getattr(one, "set_epoch", None)):
                set_epoch(epoch)
                return

    def _generators(self) -> dict[str, torch.Generator]:
        return generators_within([("loader", self.loader)])

    def _generator_states(self) -> dict[str, Any]:
        if self._generators_then is not None:
            return self._generators_then
        return {name: rng.generator_bytes(g) for name, g in self._generators().items()}

    def _set_generators(self, states: dict[str, Any]) -> None:
        for name, generator in self._generators().items():
            if (state := states.get(name, states.get(_OLD_NAMES.get(name, "")))) is not None:
                rng.set_generator(generator, state)

    def _random_states(self) -> dict[str, Any]:
        return {"rng": rng.take_all(), "generators": self._generator_states()}

    def _put_back(self, states: dict[str, Any]) -> None:
        rng.put_back(states["rng"])
        self._set_generators(states["generators"])


def generators_within(parts: list[tuple[str, Any]]) -> dict[str, torch.Generator]:
    """Every generator of these loaders and of their samplers, by path."""
    found: dict[str, torch.Generator] = {}
    waiting = list(parts)
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


def _iterators_of(loader: Any) -> "dict[weakref.ref[_BaseDataLoaderIter], int]":
    sampler = loader._index_sampler
    # Uses type(), because isinstance() would run code of proxies among the objects.
    every = [one for one in gc.get_objects() if issubclass(type(one), _BaseDataLoaderIter)]
    return {weakref.ref(one): one._num_yielded for one in every if one._index_sampler is sampler}


def _given_by(iterator: "weakref.ref[_BaseDataLoaderIter]") -> int:
    found = iterator()
    return -1 if found is None else found._num_yielded


class _SkippingSampler:
    """A sampler that skips its first items, once, in the first pass over it."""

    def __init__(
        self, inner: Iterable[Any], to_skip: int, before: Callable[[], None] | None
    ) -> None:
        self._inner = inner
        self._to_skip = to_skip
        self._before = before
        self._started: Iterator[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        # Lazy: a DataLoader draws its base seed after it has called iter() (with workers, twice),
        # and a sampler draws its own seed at its first item. The order of draws must not change.
        started, self._started = self._started, None
        yield from self._start() if started is None else started

    def skip(self) -> None:
        """Draw the items to skip, unless the loader has begun to draw."""
        if self._to_skip or self._before:
            self._started = self._start()

    def _start(self) -> Iterator[Any]:
        to_skip, self._to_skip = self._to_skip, 0
        before, self._before = self._before, None
        if before is not None:
            before()
        iterator = iter(self._inner)
        for _ in range(to_skip):
            next(iterator, None)
        return iterator
