"""The table, the Markdown and the page of a drill, also with text that contains markup."""

from dataclasses import replace

from ftrun.tools.drill.command import HEAD, cells, drill_page, grouped, line, markdown, summary
from ftrun.tools.drill.judge import FaultResult
from ftrun.tools.report.render.page import MAX_BYTES

GOOD = FaultResult(
    "hang", "hang", "rank 1", "ddp", "2 x 2", "hang in computation", "hang in computation",
    fired=True, fired_step=20, in_effect=True, detected_s=9.5, recovered_s=11.0, culprits=[1],
    culprit_right=True, action="respawn", steps_lost=1, equal=True, passed=True,
)  # fmt: skip
BAD = replace(
    GOOD, target="rank 2", detected_s=12.25, culprit_right=False, equal=False, passed=False,
    steps_lost=3, problem="names ranks [1], not [2]",
)  # fmt: skip
QUIET = FaultResult(
    "smp-kill", "smp-kill", "the node", passed=True, found="no incident", steps_lost=0
)
HOSTILE = "</td><script>alert(1)</script>\u202e\x1b[31m|<img src=http://x.invalid/y>"


def page_of(rows: list[FaultResult], name: str = "plan") -> str:
    return drill_page(
        rows, name=name, about=name, conditions=["2 cores"], took_s=100.0, source="drill.json",
        made_t_s=1.8e9,
    )  # fmt: skip


def test_table_has_a_cell_for_each_column() -> None:
    assert len(cells(GOOD)) == len(HEAD)
    assert cells(GOOD)[3:] == ("9.50 s", "yes", "respawn", "1", "yes", "yes")
    assert cells(QUIET)[3:] == ("-", "-", "-", "0", "-", "yes")
    assert "FAILED: names ranks [1], not [2]" in line(BAD)
    assert line(GOOD).endswith("hang in computation; respawn; 1 steps lost; equal: yes")


def test_summary_counts_wrong_culprits() -> None:
    assert summary([GOOD, QUIET]) == (
        "all 2 faults passed; 0 wrong culprits in 1 that had to be named"
    )
    assert summary([GOOD, BAD, QUIET]) == (
        "1 of 3 faults failed; 1 wrong culprits in 2 that had to be named"
    )


def test_markdown_has_a_line_for_each_kind_with_the_median_and_the_worst() -> None:
    third = replace(GOOD, detected_s=9.7)
    head, _, hang, quiet = markdown([GOOD, BAD, QUIET, third]).splitlines()
    assert head.startswith("| fault | trials | verdict | detected in (median)")
    assert hang == (
        "| `hang` | 3 | hang in computation | 9.70 s | 2 of 3 | respawn | 3 | 2 of 3 | 2 of 3 |"
    )
    assert quiet == "| `smp-kill` | 1 | no incident | - | - | none | 0 | - | yes |"
    assert [group.count for group in grouped([GOOD, BAD, QUIET])] == [2, 1]
    slow = [replace(GOOD, detected_s=3.0, detected_steps=steps) for steps in (9, 11, 14)]
    assert "| 3.00 s, 11 steps |" in markdown(slow)
    assert "3.00 s, 14 steps" in page_of(slow)


def test_page_reports_what_failed_and_needs_nothing_else() -> None:
    page = page_of([GOOD, BAD, QUIET])
    assert "names ranks [1], not [2]" in page
    assert "2 of 3 passed" in page
    assert "default-src 'none'" in page
    assert "What failed" not in page_of([GOOD])


def test_hostile_words_stay_words_and_many_rows_stay_small() -> None:
    hostile = replace(
        BAD, problem=HOSTILE * 50, text=HOSTILE, run=HOSTILE, job=HOSTILE, action=HOSTILE,
        found=HOSTILE, fault=HOSTILE, kind=HOSTILE, target=HOSTILE,
    )  # fmt: skip
    page = page_of([hostile] * 800, HOSTILE)
    assert "<script" not in page
    assert "<img" not in page
    assert len(page.encode()) <= MAX_BYTES
    assert "\n" not in markdown([hostile]).splitlines()[2]
