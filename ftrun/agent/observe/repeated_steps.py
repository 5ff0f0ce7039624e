"""Compares the steps that this node's ranks repeat after a restart with the earlier ones.

Runs in the main thread, once per turn of the loop.

Rule: it observes only. An error ends the comparison, never the run.
"""

import logging
from collections.abc import Callable
from functools import partial

from ftrun.agent.launch.worker_group import WorkerGroup
from ftrun.ids import Version
from ftrun.journal import Journal
from ftrun.monitor.repeat_check import Execution, RankRecords, Repeat, RepeatCheck
from ftrun.records.recovery import RepeatedStepsRecord
from ftrun.wire.cluster.generation import GenerationPlan
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage

_log = logging.getLogger(__name__)


class RepeatedSteps:
    """The comparison of one node, over all generations that this agent runs."""

    def __init__(self, journal: Journal, workers: WorkerGroup) -> None:
        self.results: dict[int, Repeat] = {}
        """By generation; the newest hundred."""
        self._journal = journal
        self._workers = workers
        self._check = RepeatCheck()
        self._pages: dict[int, SharedPage] = {}
        self._steps: dict[int, int] = {}
        """By rank: the step in its page when its records were read last."""
        self._next: Execution | None = None
        self._is_open = False

    @property
    def warning(self) -> str:
        """The newest difference that was found, with its generation; empty: none."""
        found = [(number, one) for number, one in self.results.items() if one.is_warning]
        return (
            f"after the restart to generation {found[-1][0]}: {found[-1][1].text}" if found else ""
        )

    def prepare(
        self, plan: GenerationPlan, ranks: range, restored: Version | None, *, resized: bool
    ) -> None:
        """Prepare for another generation, which may never be launched."""
        self._next = Execution(
            generation=plan.generation,
            restored=restored,
            world_size=plan.world_size,
            skipped=plan.skip_batches if restored is not None else 0,
            is_resized=resized,
            ranks={rank: RankRecords() for rank in ranks},
        )

    def launched(self) -> None:
        """Begin the comparison.

        Old pages are read only now, because a launch must not wait for that.
        """
        self.conclude()
        following, self._next = self._next, None
        if following is not None and following.ranks:
            self._guarded(partial(self._check.begin, following))
            self._pages = {int(slot.rank): slot.page for slot in self._workers.slots}
            self._is_open = following.generation > 0

    def poll(self) -> None:
        if self._is_open:
            self._guarded(self._poll)

    def conclude(self) -> None:
        """Read the last records of this generation's ranks, which are dead or have finished."""
        if self._pages:
            self._guarded(self._conclude)

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:  # noqa: BLE001 - see the rule
            self._is_open, self._pages = False, {}
            _log.exception("repeated steps are not compared: this is a bug in ftrun")

    def _poll(self) -> None:
        if not self._read():
            return
        result = self._result()
        has_started = all(page.get(HeartbeatField.FIRST_STEP_NS) for page in self._pages.values())
        if has_started and (self._check.is_over() or not self._is_attached()):
            self._is_open = False
            self._report(result)
        elif result.is_warning:
            self._report(result)

    def _conclude(self) -> None:
        self._steps = {}
        self._read()
        if self._is_open:
            self._is_open = False
            self._report(self._result())
        self._pages = {}

    def _read(self) -> bool:
        now = self._check.current
        assert now is not None
        has_new = False
        for rank, page in self._pages.items():
            step = page.get(HeartbeatField.STEP)
            if step != self._steps.get(rank):
                self._steps[rank] = step
                has_new = True
                names, records = page.samples, page.records()
                if names == page.samples:
                    now.ranks[rank].add(names, records)
        return has_new

    def _is_attached(self) -> bool:
        return any(page.get(HeartbeatField.ATTACHED) for page in self._pages.values())

    def _result(self) -> Repeat:
        return self._check.result(attached=self._is_attached())

    def _report(self, result: Repeat) -> None:
        assert self._check.current is not None
        generation = self._check.current.generation
        last = self.results.get(generation)
        if last is not None and last.text == result.text:
            return
        self.results[generation] = result
        if len(self.results) > 100:
            del self.results[min(self.results)]
        self._journal.write(RepeatedStepsRecord(generation, result))
        if result.is_warning:
            _log.warning("generation %d: %s", generation, result.text)
