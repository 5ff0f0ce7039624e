"""`ftrun.attach`, and the session it gives: the loop that a script trains in.

Runs in:  worker; also under plain python or torchrun, on any system, without snapshots.
Takes in: the model and everything else whose state a run depends on.
Gives:    a `Session`, restored in place where there is something to restore.

A step is a boundary passed. Each turn of `steps()` or `batches()` ends in one: a turn that ends
in `continue` does as well, one that is left by `break` or by an exception does not. Nothing in
here needs Linux; what does is loaded only where an agent has started this process.
"""

import logging
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ftrun.errors import UsageError
from ftrun.worker.attached import Attached, by_name
from ftrun.worker.batches import Feed
from ftrun.worker.context import WorkerContext, worker_context

if TYPE_CHECKING:
    from ftrun.worker.declared_layout import Declared
    from ftrun.worker.protection import Protection

_log = logging.getLogger(__name__)

BETWEEN_LOOPS = "between loops"
"""The phase of a rank that has left its loop: it may evaluate, save, or send its model away."""

_live: "weakref.ref[Session] | None" = None


def attach(  # noqa: PLR0913 - what a script has
    *,
    model: object,
    optimizer: object = None,
    scheduler: object = None,
    scaler: object = None,
    loader: object = None,
    warmup: Callable[[], object] | None = None,
    layout: "str | Path | Declared | None" = None,
    mesh: Mapping[str, int] | None = None,
    cast: bool = False,
    **named: object,
) -> "Session":
    """Say what makes up the state of this training, and restore it if there is something to.

    Args:
        model: one module, or a dict of them by name; before or after DDP, FSDP2, compile.
        optimizer: one torch optimizer, or a dict of them.
        scheduler: one object with a state_dict, or a dict of them.
        scaler: the same, for a GradScaler.
        loader: the loader given to `Session.batches`, or a dict of them; a `Feed` in its place.
        warmup: called once before a restore with DDP on more than two ranks, in place of the
            synthetic backward that puts DDP's buckets in order.
        layout: file of layout rules, where ranks have parts of plain tensors; a version of another
            layout is read through them. An integration gives the rules themselves.
        mesh: sizes of its axes, where they are other than in the file. Without a file: how ranks
            are arranged, the slowest axis first, such as {"pp": 2, "dp": 2, "tp": 4}. They see
            other data along axes that begin with dp, and are stages along pp.
        cast: parameters and buffers that were saved in another floating dtype are rounded to the
            one they have now, and with them state of optimizers that had the same. Otherwise they
            are refused.
        named: whatever else has a state: objects with state_dict and load_state_dict, tensors,
            dicts of plain values, torch.Generators.

    Raises:
        UsageError: a session is attached already, or something has no state.
        SnapshotError: what is to be restored does not fit, or cannot be stored.
    """
    global _live
    if is_attached():
        raise UsageError(
            "attach was called twice: one session holds all models and optimizers, as dicts by "
            "name. Call close() on the first session to begin anew"
        )
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    attached = _attached(parts, named, casts=cast)
    feeds = {
        name: thing if isinstance(thing, Feed) else Feed(name, thing)
        for name, thing in by_name("loader", loader).items()
    }
    context = worker_context()
    if layout is not None or mesh:
        from ftrun.worker.declared_layout import Declared, declared

        if not isinstance(layout, Declared):
            layout = declared(layout, mesh, context.world_size if context else None)
        attached.layout = layout
    session = Session(attached, feeds, context, warmup)
    _live = weakref.ref(session)
    return session


def _attached(parts: Mapping[str, object], named: Mapping[str, object], *, casts: bool) -> Attached:
    """Everything that was given, sorted in.

    Raises:
        UsageError: something has no state.
    """
    attached = Attached(casts=casts)
    for argument, given in parts.items():
        for name, thing in by_name(argument, given).items():
            attached.add(name, thing)
    for name, thing in named.items():
        attached.add(name, thing)
    return attached


def is_attached() -> bool:
    """Whether a session of this process takes the snapshots."""
    other = _live() if _live is not None else None
    return other is not None and not other.is_closed


class Session:
    """A training loop with step boundaries. Made by `attach`."""

    def __init__(
        self,
        attached: Attached,
        feeds: dict[str, Feed],
        context: WorkerContext | None,
        warmup: Callable[[], object] | None,
    ) -> None:
        self._feeds = feeds
        self._context = context
        self._step = 0
        self._epoch = 0
        self._in_epoch = False
        self._in_last_epoch = False
        self._boundaries = 0
        self._driver: str | None = None
        self._force = False
        self._has_begun = False
        self._restored = False
        self._waiting: dict[str, Any] = {}
        self._last_loss: torch.Tensor | None = None
        self._protection: Protection | None = None
        self._fresh_id = uuid.uuid4().hex[:12]
        self.is_closed = False
        for feed in feeds.values():
            self._warn_of(feed)
        if context is not None:
            self._protect(context, attached, warmup)

    # --- what the script may ask -----------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps done, over all restarts."""
        return self._step

    @property
    def restored(self) -> bool:
        """Whether this process began with a restored state."""
        return self._restored

    @property
    def id(self) -> str:
        """The run's name, the same after every restart."""
        return self._context.run_id if self._context else self._fresh_id

    @property
    def generation(self) -> int:
        """How many times the run has been restarted."""
        return self._context.generation if self._context else 0

    # --- loops -----------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[int]:
        """The steps from the restored one on; each turn of the loop ends in a boundary.

        Args:
            total: steps of the whole run, those before a restart included.
        """
        self._enter("steps()")
        try:
            self._begin()
            while self._step < total:
                yield self._step
                # The end of the run is what a last checkpoint should hold.
                self._force |= self._step + 1 == total
                self._boundary(allowed=True)
        finally:
            self._leave()

    def epochs(self, total: int) -> Iterator[int]:
        """The epochs from the restored one on.

        Args:
            total: epochs of the whole run.
        """
        while self._epoch < total:
            self._in_epoch = True
            self._in_last_epoch = self._epoch + 1 == total
            try:
                yield self._epoch
            finally:
                self._in_epoch = self._in_last_epoch = False
            self._epoch += 1

    def batches(self, loader: Any) -> Iterator[Any]:
        """The batches of one pass, from the restored one on.

        Each turn of the loop ends in a boundary, unless it runs inside `steps()`, which has its
        own: then the position in the data is all that is kept here.
        """
        feed = self._feed_of(loader)
        drives = self._driver is None
        if drives:
            self._enter("batches()")
        try:
            epoch = self._epoch if self._in_epoch else None
            for batch in feed.batches(epoch, self._begin):
                yield batch
                if drives:
                    self._force |= self._in_last_epoch and feed.is_at_end
                    self._boundary(allowed=True)
        finally:
            if drives:
                self._leave()

    def begin(self, done: int = 0) -> None:
        """A loop of the script's own makes its first step now; may be left out.

        What a restore has put back and the script has changed since then, by wrapping its model
        in DDP or by drawing random numbers, is put back once more.

        Args:
            done: steps before this run, such as those of a checkpoint that the script has loaded.
        """
        if not (self._restored or self._has_begun):
            self._step = done
        self._begin()

    def step_done(self, snapshot: bool = True) -> None:
        """A boundary in a loop of the script's own.

        Args:
            snapshot: false where the state may not be taken, such as in the middle of a phase.
        """
        if self._driver is not None:
            raise UsageError(f"step_done() inside a loop over {self._driver}, which counts itself")
        if not self._has_begun and self._protection is not None:
            self._protection.first_turn_is_over()
        self._has_begun = True
        self._boundary(allowed=snapshot)

    def snapshot(self) -> None:
        """Take one at the boundary that ends this turn, and wait for it. On every rank."""
        self._force = True

    def phase(self, name: str) -> "Phase":
        """Say what the script is doing; as a context manager, for the time of its block.

        Another phase begins once the snapshot under way is copied: until the next step the script
        may then change weights, also through .data.
        """
        before = ""
        if self._context is not None:
            before = self._context.page.phase
            self._context.page.phase = name
            if name != before and self._protection is not None:
                self._protection.settle()
        return Phase(self, before or "train")

    def report(self, *, loss: "float | torch.Tensor") -> None:
        """Show the loss in `ftrun status`. Never waits for a device."""
        if self._context is None:
            return
        if isinstance(loss, torch.Tensor):
            loss = loss.detach()
            if loss.device.type != "cpu":
                # The copy of the one before has long arrived.
                last, self._last_loss = self._last_loss, loss.to("cpu", non_blocking=True)
                if last is None:
                    return
                loss = last
        self._context.page.loss = float(loss)

    def close(self) -> None:
        """Detach: no more snapshots, and `attach` may be called again."""
        self.is_closed = True
        if self._protection is not None:
            self._protection.close()
            self._protection = None

    # --- inside ----------------------------------------------------------------------------

    def _protect(
        self,
        context: WorkerContext,
        attached: Attached,
        warmup: Callable[[], object] | None,
    ) -> None:
        # Not at the top: memory mapping and sockets of that kind are Linux's.
        from ftrun.worker import saver
        from ftrun.worker.protection import Protection

        if saver.is_in_use():
            raise UsageError(
                "attach was called in a script that saves or loads with ftrun.dcp, which takes the "
                "snapshots then. Use one or the other"
            )
        protection = self._protection = Protection(context, attached, warmup)
        saved = protection.restore()
        if saved is not None:
            self._restored = True
            self._step = saved["session"]["step"]
            self._epoch = saved["session"]["epoch"]
            for name, state in saved["loaders"].items():
                if name in self._feeds:
                    self._feeds[name].load_state(state)
            self._waiting = {n: s for n, s in saved["loaders"].items() if n not in self._feeds}
            self._leave_out(context.skip_batches)
        protection.begin(self._own_state)
        protection.put_back_random_states()

    def _leave_out(self, count: int) -> None:
        """The batches that led to bad numbers do not come again."""
        for feed in self._feeds.values():
            feed.leave_out(count)
        if count and not (self._feeds or self._waiting):
            _log.warning(
                "numbers.policy is skip-data, and %d batches were to be left out; but this script "
                "takes its batches by itself, so they come again: take them from session.batches()",
                count,
            )

    def _own_state(self) -> dict[str, Any]:
        return {
            "session": {"step": self._step, "epoch": self._epoch},
            "loaders": {name: feed.state() for name, feed in self._feeds.items()},
            "orders": {},
        }

    def _begin(self) -> None:
        """The first turn is about to begin; the iterator over the data exists."""
        if not self._has_begun:
            self._has_begun = True
            if self._protection is not None:
                self._protection.first_turn()

    def _boundary(self, *, allowed: bool) -> None:
        self._step += 1
        if self._protection is None:
            return
        force, self._force = self._force, False
        self._boundaries += 1
        self._watch_loaders()
        self._protection.boundary(self._step, self._own_state, force=force, allowed=allowed)

    def _watch_loaders(self) -> None:
        """Report loaders whose position no snapshot has, from the second boundary on."""
        if self._boundaries < 2 or self._context is None:
            return
        reasons = self._context.unprotected
        is_any_followed = any(feed.is_followed for feed in self._feeds.values())
        for name in self._feeds:
            if is_any_followed:  # another one may be for a later phase, or for an evaluation
                reasons.remove(name)
            elif name not in reasons:
                reasons.add(
                    name,
                    f"{name} has given no batch to this session in {self._boundaries} steps: its "
                    "position is in no snapshot, and a restart begins its data anew; iterate "
                    "session.batches(loader)",
                )

    def _enter(self, driver: str) -> None:
        if self._driver is not None:
            raise UsageError(f"a loop over {driver} inside one over {self._driver}")
        self._driver = driver
        if self._context is not None and self._context.page.phase == BETWEEN_LOOPS:
            self._context.page.phase = "train"

    def _leave(self) -> None:
        self._driver = None
        if self._context is not None and self._context.page.phase in ("", "train"):
            self._context.page.phase = BETWEEN_LOOPS
        if self._protection is not None:
            self._protection.finish()

    def _feed_of(self, loader: Any) -> Feed:
        for feed in self._feeds.values():
            if feed.loader is loader:
                return feed
        if self._feeds:
            raise UsageError(
                "batches() was given a loader that is not attached: pass every loader whose "
                "batches are trained on as attach(loader={'name': loader, ...})"
            )
        feed = self._feeds["loader"] = Feed("loader", loader)
        if "loader" in self._waiting:
            feed.load_state(self._waiting.pop("loader"))
            feed.leave_out(self._context.skip_batches if self._context is not None else 0)
        self._warn_of(feed)
        return feed

    def _warn_of(self, feed: Feed) -> None:
        rank = self._context.rank if self._context else 0
        if self._context is not None and rank == 0 and (text := feed.warning()):
            _log.warning("%s", text)


class Phase:
    """What `Session.phase` gives; leaving its block goes back to the phase before."""

    def __init__(self, session: Session, before: str) -> None:
        self._session = session
        self._before = before

    def __enter__(self) -> "Phase":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._session.phase(self._before)
