"""One verification: its runs in order, the comparison, and the result in words."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ftrun import clock
from ftrun.errors import ExitCode
from ftrun.tools.verify import compare
from ftrun.tools.verify.command import DIFFERENT, NOT_COMPARED, Options
from ftrun.tools.verify.compare import Difference, ObservedRestart, Trace
from ftrun.tools.verify.findings import Finding, find, random_sources
from ftrun.tools.verify.runs import (
    Finished,
    LimitReached,
    Limits,
    VerifyRun,
    kills_at,
    plan_kills,
)
from ftrun.wire.verify_records import VerifyPlan

EQUAL = "equal"
DIFFERS = "differs"
NOT_DETERMINISTIC = "not deterministic"
FAILED_AFTER_RESTART = "failed after a restart"
NOTHING_COMPARED = "nothing compared"

_FIRST, _REST = range(1), range(1, 1 << 30)
_FIRST_SHARE = 0.6
"""Of the time of all runs, for the first one."""


@dataclass(frozen=True)
class VerifyOutcome:
    """What is shown and what the process ends with."""

    verdict: str
    exit_code: int
    document: dict[str, Any]


class Verification:
    """Runs a script several times and compares."""

    def __init__(self, options: Options, folder: Path, tell: Callable[[str], None]) -> None:
        self._options = options
        self._folder = folder
        self._tell = tell
        steps = options.kill_steps
        self._kills = (
            kills_at(steps) if steps is not None else plan_kills(options.steps, options.num_kills)
        )
        self._limits = Limits(clock.now_s() + options.timeout_s, options.disk_bytes)
        self._runs: list[Finished] = []

    def carry_out(self) -> VerifyOutcome:
        """All of it; the result is shown."""
        self._announce()
        try:
            first = self._run("undisturbed")
            if first.exit_code != ExitCode.DONE:
                return self._script_failed(first)
            if compare.steps_of(first.trace) == 0:
                return self._nothing("the script has made no step: no session's boundary was "
                                     "passed, and no torch optimizer has stepped")  # fmt: skip
            self._say_what_is_compared(first.trace)
            second = self._run(self._kill_words(), disturbed=True)
            return self._judge(first, second)
        except LimitReached as error:
            return self._nothing(str(error))

    # --- runs ----------------------------------------------------------------------------------

    def _announce(self) -> None:
        options = self._options
        self._tell(
            f"ftrun verify {options.line.script}: {options.steps} steps undisturbed, then "
            f"{options.steps} steps with {self._kill_words()}; a third run if the two differ.\n"
            "The script is executed as a whole each time: what it writes to files and trackers is "
            f"written 2 or 3 times.\nAt most {options.timeout_s:.0f} s. "
            + (f"Records and logs: {self._folder}" if options.folder is not None else
               "Records and logs are removed at the end; --folder DIR keeps them.")
            + "\n"
        )  # fmt: skip

    def _kill_words(self) -> str:
        *most, last = (str(kill.step) for kill in self._kills)
        steps = f"steps {', '.join(most)} and {last}" if most else f"step {last}"
        return f"a rank killed after {steps}"

    def _run(self, what: str, *, disturbed: bool = False) -> Finished:
        """Raises: LimitReached."""
        number = len(self._runs) + 1
        self._tell(f"run {number}: {what} ...")
        folder = self._folder / f"run{number}"
        kills = self._kills if disturbed else ()
        plan = VerifyPlan(str(folder / "records"), self._options.steps, kills)
        is_kept = self._options.folder is not None
        with VerifyRun(folder, self._options.words, plan, is_kept=is_kept) as run:
            # What the first run takes, the ones after it take again.
            finished = run.wait(self._limits, share=_FIRST_SHARE if number == 1 else 1.0)
        self._runs.append(finished)
        told = [f"run {number}: {compare.steps_of(finished.trace)} steps, {finished.took_s:.1f} s"]
        told += [_restart_words(restart) for restart in compare.restarts(finished.trace)]
        self._tell("; ".join(told))
        return finished

    def _say_what_is_compared(self, trace: Trace) -> None:
        if not compare.has_session(trace):
            self._tell(
                "Nothing is attached: the script calls no ftrun.attach, so that a restart begins "
                "at its own beginning or at its own checkpoint. Compared are parameters and state "
                "of the optimizers after each of their steps, losses, and batches of DataLoaders."
            )

    # --- verdict -------------------------------------------------------------------------------

    def _judge(self, first: Finished, second: Finished) -> VerifyOutcome:
        reference, trace = first.trace, second.trace
        restarts = compare.restarts(trace)
        early = compare.first_difference(reference, trace, generations=_FIRST)
        if early is not None:
            return self._not_deterministic(reference, trace, early, "the second before its kill")
        noise = compare.noise(reference, trace, generations=_FIRST)
        late = compare.first_difference(reference, trace, generations=_REST)
        if not any(life.killed for _, life in compare.compared_lives(trace)):
            if second.exit_code != ExitCode.DONE:
                return self._script_failed(second)
            return self._nothing(
                f"no rank could be killed: the script made {compare.steps_of(trace)} steps, and "
                f"the first kill was due after step {self._kills[0].step}. Lower --steps or --at"
            )
        steps, made = compare.steps_of(reference), compare.steps_of(trace)
        # Without a session a restart begins to count anew.
        is_complete = made == steps or not compare.has_session(trace)
        if late is None and is_complete and second.exit_code == ExitCode.DONE:
            findings = find(reference, trace, noise, None)
            return self._equal(trace, restarts, findings)
        third = self._run("undisturbed again, to tell apart what is not deterministic")
        again = compare.first_difference(reference, third.trace, generations=_FIRST)
        if again is not None:
            return self._not_deterministic(reference, third.trace, again, "the third")
        noise |= compare.noise(reference, third.trace, generations=_FIRST)
        findings = find(reference, trace, noise, late)
        if second.exit_code != ExitCode.DONE:
            return self._failed_after_restart(second, late, restarts, findings)
        if late is None:
            return self._ends_elsewhere(steps, made, restarts, findings)
        return self._differs(trace, late, restarts, findings)

    def _equal(
        self, trace: Trace, restarts: list[ObservedRestart], findings: list[Finding]
    ) -> VerifyOutcome:
        counts = compare.counts(trace)
        repeated = sum(restart.repeated for restart in restarts)
        lines = [
            f"EQUAL: {_count(len(restarts), 'restart')}, {_count(repeated, 'step')} repeated; "
            "equal bit for bit: "
            f"{counts['tensors']} tensors and {counts['values']} values of the state after each "
            f"step, {counts['losses']} losses, {counts['inputs']} batches and inputs"
        ]
        if findings:
            lines.append("Also found, without an effect on this result:")
            lines += _numbered(findings)
        if len(restarts) < len(self._kills):
            lines.append(f"{len(restarts)} of {len(self._kills)} kills were carried out.")
        return self._outcome(EQUAL, ExitCode.DONE, lines, restarts, findings)

    def _differs(
        self,
        trace: Trace,
        found: Difference,
        restarts: list[ObservedRestart],
        findings: list[Finding],
    ) -> VerifyOutcome:
        lines = [f"DIFFERS: {_difference_words(found)}", *_exactness(trace, found, findings)]
        lines += ["Reasons found:", *_numbered(findings)]
        return self._outcome(DIFFERS, DIFFERENT, lines, restarts, findings, found)

    def _ends_elsewhere(
        self, steps: int, made: int, restarts: list[ObservedRestart], findings: list[Finding]
    ) -> VerifyOutcome:
        again = compare.steps_of(self._runs[-1].trace)
        lines = [
            f"DIFFERS: the run with kills ends after step {made:,}, and two runs without a failure "
            f"after steps {steps:,} and {again:,}; the steps that were made are equal. The total "
            "of session.steps() and batches(until=) counts the steps before a restart"
        ]
        if findings:
            lines += ["Reasons found:", *_numbered(findings)]
        return self._outcome(DIFFERS, DIFFERENT, lines, restarts, findings)

    def _failed_after_restart(
        self,
        run: Finished,
        found: Difference | None,
        restarts: list[ObservedRestart],
        findings: list[Finding],
    ) -> VerifyOutcome:
        lines = [
            f"DIFFERS: after a kill the run ends with {run.exit_code}; undisturbed it does not. "
            f"Its last lines:\n{_indented(run.last_lines)}"
        ]
        if findings:
            lines += ["Reasons found:", *_numbered(findings)]
        return self._outcome(FAILED_AFTER_RESTART, DIFFERENT, lines, restarts, findings, found)

    def _not_deterministic(
        self, reference: Trace, trace: Trace, found: Difference, which: str
    ) -> VerifyOutcome:
        finding = random_sources(reference, trace, found)
        lines = [
            f"NOT DETERMINISTIC: two runs without a failure differ (the first, and {which}), so "
            f"that a restart cannot be judged: {_difference_words(found)}",
            *_numbered([finding]),
        ]
        restarts = compare.restarts(self._runs[1].trace)
        return self._outcome(NOT_DETERMINISTIC, DIFFERENT, lines, restarts, [finding], found)

    def _script_failed(self, run: Finished) -> VerifyOutcome:
        return self._nothing(
            f"the script failed without a kill: the run ended with {run.exit_code}. Its last "
            f"lines:\n{_indented(run.last_lines)}"
        )

    def _nothing(self, reason: str) -> VerifyOutcome:
        return self._outcome(NOTHING_COMPARED, NOT_COMPARED, [f"NOT COMPARED: {reason}"], [], [])

    def _outcome(
        self,
        verdict: str,
        exit_code: int,
        lines: list[str],
        restarts: list[ObservedRestart],
        findings: list[Finding],
        found: Difference | None = None,
    ) -> VerifyOutcome:
        self._tell("\n" + "\n".join(lines))
        counts = compare.counts(self._runs[-1].trace) if self._runs else {}
        document = {
            "verdict": verdict,
            "exit_code": int(exit_code),
            "text": "\n".join(lines),
            "script": self._options.line.script,
            "runs": [
                {
                    "exit_code": run.exit_code,
                    "took_s": round(run.took_s, 3),
                    "steps": compare.steps_of(run.trace),
                    "is_attached": compare.has_session(run.trace),
                }
                for run in self._runs
            ],
            "restarts": [{**asdict(one), "repeated": one.repeated} for one in restarts],
            "difference": None if found is None else _difference_document(found),
            "findings": [asdict(finding) for finding in findings],
            "compared": counts,
        }
        return VerifyOutcome(verdict, exit_code, document)


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _restart_words(restart: ObservedRestart) -> str:
    resumed = f"resumed from step {restart.resumed_from}"
    if not restart.is_restored:
        resumed = "began again"
    repeated = f", {_count(restart.repeated, 'step')} repeated" if restart.repeated else ""
    return f"rank {restart.rank} killed after step {restart.step}, {resumed}{repeated}"


def _difference_words(found: Difference) -> str:
    names = [compare.name_of(key) for key in found.keys if compare.is_result(key)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    kinds = {"tensor": "state", "value": "state", "batch": "data", "input": "model input"}
    kind = kinds.get(compare.word_of(found.keys[0]), "loss")
    values = ""
    if kind == "loss" and found.record.values.get("loss"):
        now, was = found.record.values["loss"], found.reference.values.get("loss")
        values = f", {now} in place of {was}"
    shown = "" if kind == "loss" else f" ({', '.join(names[:3])}{more})"
    return f"step {found.step} on rank {found.rank} differs first in the {kind}{shown}{values}"


def _exactness(trace: Trace, found: Difference, findings: list[Finding]) -> list[str]:
    """That the restored state is not the reason."""
    if any(finding.kind in ("snapshot", "overwritten", "not restored") for finding in findings):
        return []
    life = next((x for x in trace[found.rank] if x.generation == found.generation), None)
    if life is None or not life.restored:
        return []
    return [
        f"The state of step {life.start} was restored exactly; something outside of it differs."
    ]


def _numbered(findings: list[Finding]) -> list[str]:
    lines = []
    for number, finding in enumerate(findings, 1):
        lines.append(f"  {number}. {finding.text}")
        if finding.remedy:
            lines.append(f"     {finding.remedy}")
    return lines


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _difference_document(found: Difference) -> dict[str, Any]:
    return {
        "rank": found.rank,
        "generation": found.generation,
        "step": found.step,
        "event": found.event,
        "keys": list(found.keys),
        "where": found.record.where,
    }
