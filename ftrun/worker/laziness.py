"""Proof that what was copied late is still what it was at the boundary.

Runs in:  worker; made in the training thread, asked in the copy thread at the copy's end.
Takes in: the lasting sources of a boundary.
Gives:    the names of lazy sources that have changed since.

Version counters count every change in place that autograd can see, and addresses tell of new
memory behind an old name. What counts nothing (`p.data.clamp_()` and its like) is found by
rehearsals, see capture.py.
"""

from collections.abc import Collection

from ftrun.snapshot.layout import When
from ftrun.worker.state_tree import Lasting, address_of
from ftrun.worker.tensors import version_of


class Proof:
    """What the lazy sources were like at the boundary."""

    def __init__(self, lasting: Lasting, hasty: Collection[str]) -> None:
        chosen = [
            (source, original)
            for source, original in zip(lasting.sources, lasting.originals, strict=True)
            if source.when is When.LAZY and source.name not in hasty
        ]
        self._sources = [source for source, _ in chosen]
        self._originals = [original for _, original in chosen]
        self._marks = self._look()

    def changed(self) -> list[str]:
        """Names of the sources that are not what they were."""
        return sorted(
            source.name
            for source, before, now in zip(self._sources, self._marks, self._look(), strict=True)
            if before != now
        )

    def _look(self) -> list[tuple[int, int]]:
        return [
            (version_of(source.tensor), address_of(original))
            for source, original in zip(self._sources, self._originals, strict=True)
        ]
