"""`select.select` for descriptors of any number; the original refuses those from 1024 on."""

import selectors
from collections.abc import Sequence
from typing import Any


def select(
    readers: Sequence[Any], writers: Sequence[Any], _: Sequence[Any], timeout_s: float
) -> tuple[list[Any], list[Any], list[Any]]:
    """Those that can be read and written, as `select.select` gives them."""
    events = {id(one): [one, 0] for one in (*readers, *writers)}
    for one in readers:
        events[id(one)][1] |= selectors.EVENT_READ
    for one in writers:
        events[id(one)][1] |= selectors.EVENT_WRITE
    with selectors.PollSelector() as selector:
        for one, mask in events.values():
            selector.register(one, mask)
        found = selector.select(timeout_s)
    readable = [key.fileobj for key, mask in found if mask & selectors.EVENT_READ]
    return readable, [key.fileobj for key, mask in found if mask & selectors.EVENT_WRITE], []
