"""This process gets no more descriptors or threads for a while."""

import contextlib
import resource
import threading
from collections.abc import Iterator

USED = 3
"""Numbers below this one are always in use."""


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (USED, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """`Thread.start` raises RuntimeError, because the kernel has no memory for such a stack."""
    before = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(before)
