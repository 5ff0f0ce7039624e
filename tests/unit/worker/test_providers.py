"""State providers write into a slot of their own, and their mistakes reach no other state."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ftrun.errors import ProviderFailed, UsageError
from ftrun.snapshot.layout import PIECE_BYTES, make_layout
from ftrun.snapshot.plain_values import decode
from ftrun.worker.capture.copying import SlotCopy, SlotViews
from ftrun.worker.state.attached import AttachedState, Skip
from ftrun.worker.state.providers import ProviderSizes, load_providers
from ftrun.worker.state.state_tree import BoundaryState, StateTree


class Log:
    """Append-only bytes; what was appended does not change."""

    def __init__(self, content: bytes = b"") -> None:
        self.content = content

    def describe(self) -> tuple[int, Any]:
        return len(self.content), self.content

    def capture(self, frozen: Any, into: memoryview) -> None:
        into[:] = frozen

    def restore(self, data: memoryview) -> None:
        self.content = bytes(data)


class Live(Log):
    """A wrong provider: it captures what it holds now, instead of what it has described."""

    def capture(self, frozen: Any, into: memoryview) -> None:
        into[:] = self.content


class Keeping(Log):
    """A wrong provider: it keeps a view of the slot."""

    def capture(self, frozen: Any, into: memoryview) -> None:
        self.kept = np.frombuffer(into, np.uint8)


class Failing(Log):
    """A provider with a bug in each method."""

    def __init__(self, where: str) -> None:
        super().__init__(b"12")
        self.where = where

    def describe(self) -> tuple[int, Any]:
        if self.where == "describe":
            raise RuntimeError("no description")
        return (-1, None) if self.where == "size" else super().describe()

    def capture(self, frozen: Any, into: memoryview) -> None:
        if self.where == "capture":
            raise RuntimeError("no content")
        into[:] = b"123" if self.where == "long" else frozen


class Exiting(Log):
    """A provider that ends its thread."""

    def capture(self, frozen: Any, into: memoryview) -> None:
        raise SystemExit(3)


def captured(
    tree: StateTree, boundary_names: set[str] | None = None
) -> tuple[BoundaryState, SlotCopy, SlotViews, memoryview]:
    """A whole copy of the present state: boundary and lazy part, with all digests."""
    state = tree.collect({})
    entries = [*state.persistent.entries, *(one.entry for one in (*state.fresh, *state.provided))]
    layout = make_layout(entries, plain_bytes=len(state.plain) + 8)
    views = SlotViews(layout, memoryview(bytearray(layout.image_bytes)))
    copy = views.prepare(state.persistent.sources, state.fresh, boundary_names or set())
    copy.provide(state.provided, views, boundary_names or set())
    table = memoryview(bytearray(8 * len(layout.pieces))).cast("Q")
    copy.copy_boundary()
    copy.copy_lazy(table)
    return state, copy, views, table


def tree_with(**providers: Any) -> StateTree:
    attached = AttachedState()
    attached.add("model", nn.Linear(3, 2))
    for name, one in providers.items():
        attached.add(name, one)
    return StateTree(attached)


def content_of(views: SlotViews, name: str) -> bytes:
    return bytes(views.target(name).numpy())


def test_the_bytes_of_each_provider_come_back() -> None:
    tree = tree_with(first=Log(b"abc"), second=Log(bytes(range(256)) * 2000), empty=Log())
    state, _, views, _ = captured(tree)
    saved = decode(
        decode(state.plain)["providers"], deref=lambda ref: views.target(ref.name).clone()
    )
    other = {name: Log(b"?") for name in ("first", "second", "empty")}
    load_providers(saved, other, ProviderSizes())
    for name, one in tree.attached.providers.items():
        assert other[name].content == one.content  # type: ignore[attr-defined]


def test_a_provider_has_pieces_of_its_own_and_the_rest_of_them_is_zero() -> None:
    tree = tree_with(log=Log(b"long" * 100))
    captured(tree)
    tree.attached.providers["log"].content = b"short"  # type: ignore[attr-defined]
    _, _, views, _ = captured(tree)
    content = content_of(views, "log")
    assert len(content) == PIECE_BYTES
    assert content == b"short" + bytes(PIECE_BYTES - 5)
    entry = next(one for one in views.layout.entries if one.name == "log")
    (index,) = views.layout.pieces_of(entry)
    piece = views.layout.pieces[index]
    assert (piece.offset, piece.num_bytes) == (entry.offset, entry.num_bytes)


def test_an_entry_grows_with_room_and_never_shrinks() -> None:
    sizes, log = ProviderSizes(), Log(bytes(PIECE_BYTES + 1))
    (first,) = sizes.describe({"log": log})
    assert first.capacity_bytes == 2 * PIECE_BYTES
    log.content = bytes(4 * PIECE_BYTES)
    (grown,) = sizes.describe({"log": log})
    assert grown.capacity_bytes == 5 * PIECE_BYTES
    log.content = b""
    (small,) = sizes.describe({"log": log})
    assert small.capacity_bytes == 5 * PIECE_BYTES
    sizes.restored("log", 7 * PIECE_BYTES)
    (restored,) = sizes.describe({"log": log})
    assert restored.capacity_bytes == 7 * PIECE_BYTES


@pytest.mark.parametrize("is_at_boundary", [False, True])
def test_a_second_capture_finds_a_provider_that_was_not_frozen(is_at_boundary: bool) -> None:
    live, frozen = Live(b"before"), Log(b"before")
    tree = tree_with(live=live, frozen=frozen)
    _, copy, _, table = captured(tree, {"live"} if is_at_boundary else set())
    live.content, frozen.content = b"behind", b"behind"
    assert copy.differing(table) == ([] if is_at_boundary else ["live"])
    assert not copy.provided, "what a provider has frozen is released"


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("describe", r"describe\(\): RuntimeError: no description"),
        ("size", r"describe\(\) returned -1 as the number of bytes"),
        ("capture", r"capture\(\): RuntimeError: no content"),
        ("long", r"capture\(\): ValueError"),
    ],
)
def test_an_error_of_a_provider_has_its_name(where: str, reason: str) -> None:
    with pytest.raises(ProviderFailed, match=f"the state provider log: {reason}"):
        captured(tree_with(log=Failing(where)))


def test_a_provider_that_keeps_a_view_of_its_memory_is_refused() -> None:
    with pytest.raises(ProviderFailed, match="keeps a view of its memory"):
        captured(tree_with(log=Keeping(b"12")))


def test_a_second_capture_that_fails_counts_as_a_difference() -> None:
    log = Failing("")
    _, copy, _, table = captured(tree_with(log=log))
    log.where = "capture"
    assert copy.differing(table) == ["log"]


def test_a_failed_restore_has_the_name_of_the_provider() -> None:
    class Refusing(Log):
        def restore(self, data: memoryview) -> None:
            raise ValueError("another format")

    saved = {"log": {"num_bytes": 1, "content": torch.zeros(4, dtype=torch.uint8)}}
    with pytest.raises(ProviderFailed, match=r"log: restore\(\): ValueError: another format"):
        load_providers(saved, {"log": Refusing()}, ProviderSizes())


def test_a_skipped_provider_is_in_no_snapshot() -> None:
    tree = tree_with(log=Log(b"abc"))
    tree.attached.skip = Skip(["log"])
    state = tree.collect({})
    assert state.provided == ()
    assert "providers" not in decode(state.plain)


def test_an_object_with_two_of_the_three_methods_is_none() -> None:
    class Half:
        def describe(self) -> None: ...

        def capture(self) -> None: ...

    with pytest.raises(UsageError, match=r"ftrun\.StateProvider"):
        AttachedState().add("half", Half())


def test_an_exit_in_the_copy_thread_is_a_failure_and_in_the_main_thread_an_exit() -> None:
    (state,) = ProviderSizes().describe({"log": Exiting(b"12")})
    target = np.zeros(state.capacity_bytes, np.uint8)
    found: list[BaseException] = []

    def work() -> None:
        try:
            state.write(target)
        except BaseException as error:  # noqa: BLE001
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert isinstance(found[0], ProviderFailed)
    assert "SystemExit: 3" in str(found[0])
    with pytest.raises(SystemExit):
        state.write(target)
