"""The attached loaders of a session, and their positions in a snapshot.

Runs in:  worker, training thread; also under plain python.

A loader may be named at `attach` or first be passed to `batches()`. Until then, its restored
position waits here.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from ftrun.errors import UsageError
from ftrun.worker.context import WorkerContext
from ftrun.worker.state.attached import by_name
from ftrun.worker.state.data_position import DataPosition

_log = logging.getLogger(__name__)


def positions_of(loader: object) -> dict[str, DataPosition]:
    return {
        name: thing if isinstance(thing, DataPosition) else DataPosition(name, thing)
        for name, thing in by_name("loader", loader).items()
    }


def refuse_loader(argument: str, thing: object) -> None:
    """Raise UsageError if `thing`, given as this argument of `attach`, is a loader."""
    if isinstance(thing, DataLoader):
        raise UsageError(
            f"attach was given a {type(thing).__name__} as {argument}: pass it by name, "
            "attach(..., loader=loader)"
        )


class AttachedLoaders:
    """Positions by name, and restored positions of loaders that the script has not used yet."""

    def __init__(self, positions: dict[str, DataPosition], context: WorkerContext | None) -> None:
        self._positions = positions
        self._context = context
        self._waiting: dict[str, Any] = {}
        self._keeps: tuple[Callable[[], int], set[int]] | None = None
        for position in positions.values():
            self._warn_of(position)

    def __iter__(self) -> Iterator[DataPosition]:
        return iter(self._positions.values())

    def __len__(self) -> int:
        return len(self._positions)

    def state(self) -> dict[str, Any]:
        return {**self._waiting, **{n: one.state() for n, one in self._positions.items()}}

    def load(self, saved: dict[str, Any], left: Collection[str]) -> None:
        """Restore all positions; `left`: loaders whose pass was left by `break`."""
        self._waiting = {
            # A pass that was left by break does not resume.
            name: {**state, "own": None} if name in left else state
            for name, state in saved.items()
        }
        for name in self._waiting.keys() & self._positions.keys():
            self._positions[name].load_state(self._waiting.pop(name))
        count = self._context.launch.skip_batches if self._context is not None else 0
        for position in self._positions.values():
            position.leave_out(count)
        if count and not (self._positions or self._waiting):
            _log.warning(
                "numerics.policy: skip-data cannot skip %d batches, because the script does not "
                "iterate session.batches(). They are repeated",
                count,
            )

    def keep_batches(self, step: Callable[[], int], others: Mapping[str, object]) -> None:
        """Keep batches for `rewind`; `others`: generators that are attached by themselves.

        `step` returns the number of step boundaries so far.
        """
        self._keeps = step, {id(one) for one in others.values()}
        for position in self._positions.values():
            position.keep_batches(*self._keeps)

    def forget_before(self, step: int) -> None:
        for position in self._positions.values():
            position.forget_before(step)

    def rewind(self, saved: dict[str, Any], step: int) -> None:
        """Go back to the positions after this step."""
        for name, state in saved.items():
            if name in self._positions:
                self._positions[name].rewind(state, step)
            else:
                self._waiting[name] = state

    def stay_problem(self) -> str:
        """Why a running loop cannot go back, in words; empty if it can."""
        names = [name for name, one in self._positions.items() if not one.can_rewind]
        return f"{names[0]} has an iteration of its own, which cannot go back" if names else ""

    def put_back_generators(self) -> None:
        for position in self._positions.values():
            position.put_back_generators()

    def of(self, loader: Any) -> DataPosition:
        """The position of a loader that was passed to `batches()`. Raises UsageError."""
        for position in self._positions.values():
            if position.loader is loader:
                return position
        if self._positions:
            raise UsageError(
                "batches() was given a loader that is not attached: pass every loader whose "
                "batches are trained on as attach(loader={'name': loader, ...})"
            )
        position = self._positions["loader"] = DataPosition("loader", loader)
        if self._keeps is not None:
            position.keep_batches(*self._keeps)
        if "loader" in self._waiting:
            position.load_state(self._waiting.pop("loader"))
            if self._context is not None:
                position.leave_out(self._context.launch.skip_batches)
        self._warn_of(position)
        return position

    def watch(self, boundaries: int) -> None:
        """Report loaders that have given no batch to the session in so far `boundaries` steps."""
        if boundaries < 2 or self._context is None:
            return
        reasons = self._context.unprotected
        is_any_followed = any(one.is_followed for one in self._positions.values())
        for name, position in self._positions.items():
            # If one loader is tracked, another may be for a later phase or for an evaluation.
            if position.is_followed or (is_any_followed and not position.is_by_hand(boundaries)):
                reasons.remove(name)
            elif name not in reasons:
                reasons.add(
                    name,
                    f"{name} has given no batch to this session in {boundaries} steps: its "
                    "position is in no snapshot, and a restart begins its data from the start; "
                    "iterate session.batches(loader)",
                )

    def _warn_of(self, position: DataPosition) -> None:
        is_first_rank = self._context is not None and self._context.rank == 0
        if is_first_rank and (text := position.warning()):
            _log.warning("%s", text)
