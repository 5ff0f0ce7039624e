"""Renders a drill as one HTML file in the style of the reports.

Runs in: cli. Pure, except for reading its template.
"""

from collections.abc import Sequence
from typing import Any

from ftrun.tools.drill.drill_table import detected, grouped, seconds, summary, yes_or_no
from ftrun.tools.drill.judge import FaultResult
from ftrun.tools.report.render.page import fitted_page

_MOST_ROWS = 500


def drill_page(
    rows: Sequence[FaultResult],
    *,
    name: str,
    about: str,
    conditions: Sequence[str],
    took_s: float,
    source: str,
    made_t_s: float,
) -> str:
    """Renders the page.

    Args:
        rows: the results of all faults.
        name: the name of the plan.
        about: the plan's description.
        conditions: short phrases about the machine and versions.
        took_s: duration of the whole drill.
        source: the JSON file with the same rows.
        made_t_s: the current wall time.
    """

    def values(share: float) -> dict[str, Any]:
        return {
            "rows": rows,
            "failed": [row for row in rows if not row.passed],
            "groups": grouped(rows),
            "passed": sum(row.passed for row in rows),
            "sentence": summary(rows),
            "name": name,
            "about": about,
            "conditions": conditions,
            "took_s": took_s,
            "most": max(int(_MOST_ROWS * share), 20),
            "detected": detected,
            "seconds": seconds,
            "yes_or_no": yes_or_no,
        }

    return fitted_page("drill.html", values, source=source, made_t_s=made_t_s)
