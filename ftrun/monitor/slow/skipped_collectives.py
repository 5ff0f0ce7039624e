"""Compares the number of collectives that ranks have called by the same step.

A rank that skips one collective takes part in the next one together with the others' previous one.
If sizes are equal, nothing hangs, and from then on every sum combines two different steps. Only the
count shows this.

Rule 1: A difference is reported only if all ranks had equal counts for some steps before. If ranks
        call different numbers by design (stages of a pipeline), nothing is reported.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from ftrun.monitor.verdicts import Confidence, Verdict, VerdictKind, nodes_of, ranks_text

ENOUGH = 3
"""Number of steps with equal counts on all ranks that enable the check."""

KEPT = 64


class CollectiveCounts:
    """State of one generation."""

    def __init__(self) -> None:
        self._at: dict[int, dict[int, int]] = {}
        self._agreed: list[int] = []
        self._is_off = False

    def poll(
        self,
        reported: Iterable[tuple[int, tuple[tuple[int, int], ...]]],
        world_size: int,
        node_of: Mapping[int, str],
    ) -> Verdict | None:
        """Add reports as (rank, ((step, calls), ...)), and judge; returns one verdict only."""
        for rank, counts in reported:
            for step, calls in counts:
                self._at.setdefault(step, {})[rank] = calls
        while len(self._at) > KEPT:
            del self._at[min(self._at)]
        if self._is_off or world_size < 2:
            return None
        for step in sorted(self._at):
            counts_here = self._at[step]
            if len(counts_here) < world_size or step in self._agreed:
                continue
            if len(set(counts_here.values())) == 1:
                self._agreed.append(step)
                continue
            self._is_off = True
            return self._verdict(step, node_of) if len(self._agreed) >= ENOUGH else None
        self._agreed = self._agreed[-KEPT:]
        return None

    def _verdict(self, step: int, node_of: Mapping[int, str]) -> Verdict:
        counts = self._at[step]
        usual, num_usual = Counter(counts.values()).most_common(1)[0]
        is_clear = num_usual * 2 > len(counts)
        if not is_clear:  # a missing call is more likely than an extra one
            usual = max(counts.values())
        ranks = tuple(sorted(rank for rank, calls in counts.items() if calls != usual))
        last = max((one for one in self._agreed if one < step), default=0)
        how = ", ".join(
            f"rank {rank} has called {abs(usual - counts[rank]):,} "
            f"{'fewer' if counts[rank] < usual else 'more'}"
            for rank in ranks[:4]
        )
        subject = ranks_text(ranks)
        return Verdict(
            kind=VerdictKind.SKIPPED_COLLECTIVE,
            culprits=ranks,
            nodes=nodes_of(ranks, node_of),
            victims=tuple(sorted(set(counts) - set(ranks))),
            text=f"{subject} skipped collectives between steps {last:,} and {step:,} without a "
            "hang: "
            "since then sums combine different steps, and the training is wrong",
            evidence=(
                f"by step {last:,} all ranks had called the same number of collectives of the "
                "default group",
                f"by step {step:,} most had called {usual:,}; {how}",
            ),
            counter_evidence=()
            if is_clear
            else ("with two ranks, the other one may have called too many",),
            confidence=Confidence.CERTAIN if is_clear else Confidence.LIKELY,
            fingerprint="skipped without a hang",
        )
