"""Carries out a verification: its runs in order, the comparison, and the result as text."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ftrun import clock
from ftrun.cli.screen.text import count, listed
from ftrun.errors import ExitCode
from ftrun.tools.verify import compare
from ftrun.tools.verify.command import DIFFERENT, NOT_COMPARED, Options
from ftrun.tools.verify.compare import Difference, ObservedRestart, Trace
from ftrun.tools.verify.findings import Finding, find, random_sources
from ftrun.tools.verify.runs import Finished, LimitReached, VerifyRun, kills_at, plan_kills
from ftrun.wire.verify_records import VerifyPlan

EQUAL = "equal"
DIFFERS = "differs"
NOT_DETERMINISTIC = "not deterministic"
FAILED_AFTER_RESTART = "failed after a restart"
NOTHING_COMPARED = "nothing compared"

_SHOWN_OF_DIFFERENCE = ("rank", "generation", "step", "event", "keys")
_FIRST, _REST = range(1), range(1, 1 << 30)
_FIRST_SHARE = 0.6
"""Part of the time of all runs that the first one may take."""


Document = dict[str, Any]
"""The result as `--json` prints it; includes the exit code of the process."""


class Verification:
    """Runs a script several times and compares the runs."""

    def __init__(self, options: Options, folder: Path, show: Callable[[str], None]) -> None:
        self._options = options
        self._folder = folder
        self._show = show
        steps = options.kill_steps
        self._kills = (
            kills_at(steps) if steps is not None else plan_kills(options.steps, options.num_kills)
        )
        self._end_s = clock.now_s() + options.timeout_s
        self._runs: list[Finished] = []

    def carry_out(self) -> Document:
        self._announce()
        try:
            first = self._run("undisturbed")
            if first.exit_code != ExitCode.DONE:
                return self._script_failed(first)
            if compare.steps_of(first.trace) == 0:
                return self._nothing("the script has made no step: no session's boundary was "
                                     "passed, and no torch optimizer has stepped")  # fmt: skip
            if not compare.has_session(first.trace):
                self._show(
                    "Nothing is attached: the script calls no ftrun.attach, so that a restart "
                    "begins at the beginning of the script or at its own checkpoint. Compared are "
                    "parameters and state of the optimizers after each of their steps, losses, and "
                    "batches of DataLoaders."
                )
            second = self._run(self._kill_text(), disturbed=True)
            return self._judge(first, second)
        except LimitReached as error:
            return self._nothing(str(error))

    def _announce(self) -> None:
        options = self._options
        self._show(
            f"ftrun verify {options.line.script}: {options.steps} steps undisturbed, then "
            f"{options.steps} steps with {self._kill_text()}; a third run if the two differ.\n"
            "The script is executed as a whole each time: what it writes to files and trackers is "
            f"written 2 or 3 times.\nAt most {options.timeout_s:.0f} s. "
            + (f"Records and logs: {self._folder}" if options.folder is not None else
               "Records and logs are removed at the end; --folder DIR keeps them.")
            + "\n"
        )  # fmt: skip

    def _kill_text(self) -> str:
        *most, last = (str(kill.step) for kill in self._kills)
        steps = f"steps {', '.join(most)} and {last}" if most else f"step {last}"
        return f"a rank killed after {steps}"

    def _run(self, what: str, *, disturbed: bool = False) -> Finished:
        number = len(self._runs) + 1
        self._show(f"run {number}: {what} ...")
        folder = self._folder / f"run{number}"
        kills = self._kills if disturbed else ()
        plan = VerifyPlan(str(folder / "records"), self._options.steps, kills)
        is_kept = self._options.folder is not None
        with VerifyRun(folder, self._options.words, plan, is_kept=is_kept) as run:
            # The other runs need the time of the first one again.
            share = _FIRST_SHARE if number == 1 else 1.0
            left_s = self._end_s - clock.now_s()
            finished = run.wait(timeout_s=share * left_s, disk_bytes=self._options.disk_bytes)
        self._runs.append(finished)
        texts = [f"run {number}: {compare.steps_of(finished.trace)} steps, {finished.took_s:.1f} s"]
        texts += [_restart_text(restart) for restart in compare.restarts(finished.trace)]
        self._show("; ".join(texts))
        return finished

    def _judge(self, first: Finished, second: Finished) -> Document:
        reference, trace = first.trace, second.trace
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
        is_complete = compare.is_complete(reference, trace)
        if late is None and is_complete and second.exit_code == ExitCode.DONE:
            return self._equal(trace, find(reference, trace, noise, None))
        third = self._run("undisturbed again, to exclude a script that is not deterministic")
        again = compare.first_difference(reference, third.trace, generations=_FIRST)
        if again is not None:
            return self._not_deterministic(reference, third.trace, again, "the third")
        noise |= compare.noise(reference, third.trace, generations=_FIRST)
        return self._differs(second, late, find(reference, trace, noise, late))

    def _equal(self, trace: Trace, findings: list[Finding]) -> Document:
        counts, restarts = compare.counts(trace), compare.restarts(trace)
        repeated = sum(restart.repeated for restart in restarts)
        lines = [
            f"EQUAL: {count(len(restarts), 'restart')}, {count(repeated, 'step')} repeated; "
            "equal bit for bit: "
            f"{counts['tensors']} tensors and {counts['values']} values of the state after each "
            f"step, {counts['losses']} losses, {counts['inputs']} batches and inputs"
        ]
        if findings:
            lines += ["Also found, without an effect on this result:", *_numbered(findings)]
        if failures := compare.own_failures(trace):
            lines.append(
                f"{count(failures, 'more restart')}: the script failed by itself after a kill. Its "
                "output has the error"
            )
        if len(restarts) < len(self._kills):
            lines.append(f"{len(restarts)} of {len(self._kills)} kills were carried out.")
        return self._outcome(EQUAL, ExitCode.DONE, lines, findings, restarts=restarts)

    def _differs(
        self, run: Finished, found: Difference | None, findings: list[Finding]
    ) -> Document:
        verdict = DIFFERS
        if run.exit_code != ExitCode.DONE:
            verdict = FAILED_AFTER_RESTART
            lines = [
                f"DIFFERS: after a kill the run ends with {run.exit_code}; undisturbed it does "
                f"not. Its last lines:\n{_indented(run.last_lines)}"
            ]
        elif found is not None:
            lines = [f"DIFFERS: {_difference_text(found)}", *_exactness(run.trace, found, findings)]
        else:
            first, made, third = (compare.steps_of(one.trace) for one in self._runs)
            lines = [
                f"DIFFERS: the run with kills ends after step {made:,}, and two runs without a "
                f"failure after steps {first:,} and {third:,}; the steps that were made are equal. "
                "The total of session.steps() and batches(until=) counts the steps before a restart"
            ]
        if findings:
            lines += ["Reasons found:", *_numbered(findings)]
        restarts = compare.restarts(run.trace)
        return self._outcome(verdict, DIFFERENT, lines, findings, found, restarts=restarts)

    def _not_deterministic(
        self, reference: Trace, trace: Trace, found: Difference, which: str
    ) -> Document:
        finding = random_sources(reference, trace, found)
        lines = [
            f"NOT DETERMINISTIC: two runs without a failure differ (the first, and {which}), so "
            f"that a restart cannot be judged: {_difference_text(found)}",
            *_numbered([finding]),
        ]
        restarts = compare.restarts(self._runs[1].trace)
        return self._outcome(
            NOT_DETERMINISTIC, DIFFERENT, lines, [finding], found, restarts=restarts
        )

    def _script_failed(self, run: Finished) -> Document:
        return self._nothing(
            f"the script failed without a kill: the run ended with {run.exit_code}. Its last "
            f"lines:\n{_indented(run.last_lines)}"
        )

    def _nothing(self, reason: str) -> Document:
        return self._outcome(NOTHING_COMPARED, NOT_COMPARED, [f"NOT COMPARED: {reason}"], [])

    def _outcome(
        self,
        verdict: str,
        exit_code: int,
        lines: list[str],
        findings: list[Finding],
        found: Difference | None = None,
        *,
        restarts: Sequence[ObservedRestart] = (),
    ) -> Document:
        self._show("\n" + "\n".join(lines))
        return {
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
            "difference": None
            if found is None
            else {
                **{name: getattr(found, name) for name in _SHOWN_OF_DIFFERENCE},
                "where": found.record.where,
            },
            "findings": [asdict(finding) for finding in findings],
            "compared": compare.counts(self._runs[-1].trace) if self._runs else {},
        }


def _restart_text(restart: ObservedRestart) -> str:
    resumed = f"resumed from step {restart.resumed_from}"
    if not restart.is_restored:
        resumed = "restarted from the beginning"
    repeated = f", {count(restart.repeated, 'step')} repeated" if restart.repeated else ""
    return f"rank {restart.rank} killed after step {restart.step}, {resumed}{repeated}"


def _difference_text(found: Difference) -> str:
    names = [compare.name_of(key) for key in found.keys if compare.is_result(key)]
    kinds = {"tensor": "state", "value": "state", "batch": "data", "input": "model input"}
    kind = kinds.get(compare.word_of(found.keys[0]), "loss")
    values = ""
    if kind == "loss" and found.record.values.get("loss"):
        now, was = found.record.values["loss"], found.reference.values.get("loss")
        values = f", {now} in place of {was}"
    shown = "" if kind == "loss" else f" ({listed(names, 3)})"
    return f"step {found.step} on rank {found.rank} differs first in the {kind}{shown}{values}"


def _exactness(trace: Trace, found: Difference, findings: list[Finding]) -> list[str]:
    if any(finding.kind in ("snapshot", "overwritten", "not restored") for finding in findings):
        return []
    life = next((x for x in trace[found.rank] if x.generation == found.generation), None)
    if life is None or not life.restored:
        return []
    return [f"The state of step {life.start} was restored exactly; other state differs."]


def _numbered(findings: list[Finding]) -> list[str]:
    lines = []
    for number, finding in enumerate(findings, 1):
        lines.append(f"  {number}. {finding.text}")
        if finding.remedy:
            lines.append(f"     {finding.remedy}")
    return lines


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
