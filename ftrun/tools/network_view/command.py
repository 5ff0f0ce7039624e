"""`ftrun network`: the roads between a run's nodes, and what was planned on them.

Runs in:  cli. Changes nothing.
Takes in: what the run's agent tells, or what a run that is over has kept.
Gives:    tables and words; a picture, a page or JSON.
"""

import json
from pathlib import Path
from typing import Any

from ftrun import clock
from ftrun.cli.screen.atomic_output import is_stdout, write_out
from ftrun.errors import ExitCode, UsageError
from ftrun.tools.network_view import text as words
from ftrun.tools.network_view.facts import NetworkFacts, network_facts
from ftrun.tools.network_view.network_part import NetworkReport, told_by

_MOST_ROWS = 60


def network(
    run_id: str | None, *, as_json: bool = False, svg: str | None = None, html: str | None = None
) -> int:
    """Show the roads of a run.

    Args:
        run_id: or the folder of its logs; None: the run that is alive, else the newest one here.
        as_json: what the run tells, as it came.
        svg: file for the picture.
        html: file for the page.

    Raises:
        UsageError: several runs are alive and none is named; two documents for stdout.
        FtrunError: no such run, or it knows nothing of a network; a file cannot be written.
    """
    named = ((svg, "--svg"), (html, "--html"))
    files = [("-" if is_stdout(path) else path, flag) for path, flag in named if path]
    on_stdout = [path for path, _ in files].count("-") + as_json
    if on_stdout > 1:
        raise UsageError(
            "one of --json, --svg - and --html - can have stdout. Name files for the others"
        )
    told = told_by(run_id, below=Path.cwd())
    facts = network_facts(told.part)
    for path, flag in files:
        write_out(path, svg_of(facts) if flag == "--svg" else html_of(told, facts), flag=flag)
    if as_json:
        document = {"run_id": told.run_id, "is_live": told.is_live, **told.document}
        write_out(None, json.dumps(document, indent=1) + "\n")
    elif not on_stdout:
        # Imported here: JSON and files need no tables.
        from ftrun.tools.network_view.network_table import show_network

        show_network(told, facts)
        write_out(None, "".join(f"{path}\n" for path, _ in files))
    return ExitCode.DONE


def svg_of(facts: NetworkFacts) -> str:
    """The picture as a file of its own."""
    from ftrun.tools.network_view.picture import picture
    from ftrun.tools.report.render.page import picture_style

    return f"{picture(facts, picture_style())}\n"


def html_of(told: NetworkReport, facts: NetworkFacts) -> str:
    """All of it as one page."""
    from ftrun.tools.network_view.network_table import CELLS, FEW, matrix, matrix_rails, worst_nodes
    from ftrun.tools.network_view.picture import FEW_DRAWN, picture
    from ftrun.tools.report.render.page import fitted_page

    is_few = len(facts.nodes) <= FEW

    def values(share: float) -> dict[str, Any]:
        most = max(int(_MOST_ROWS * share), 8)
        nodes = [] if is_few else worst_nodes(facts)
        single = facts.single()
        return {
            "run_id": told.run_id,
            "verdict": words.verdict(told, facts),
            "survey": words.survey_words(told, facts),
            "effect": words.effect(told.part),
            "in_effect": told.part.in_effect,
            "dead": sum(one.dead for one in facts.rail_facts),
            "slow": sum(one.slow for one in facts.rail_facts),
            "picture": picture(facts),
            "caption": words.caption(facts, is_few=len(facts.nodes) <= FEW_DRAWN),
            "findings": words.findings(told.part)[:most],
            "rail_head": words.RAIL_HEAD,
            "rail_rows": [words.rail_row(one, told.part) for one in facts.rail_facts],
            "names": facts.nodes,
            "cells": CELLS,
            "matrices": [(rail, matrix(facts, rail)) for rail in matrix_rails(facts)]
            if is_few
            else [],
            "node_head": words.NODE_HEAD,
            "nodes_title": words.nodes_title(nodes),
            "node_rows": [words.node_row(one, facts) for one in nodes[:most]],
            "road_head": words.ROAD_HEAD,
            "roads_title": words.SINGLE_ROADS,
            "road_rows": [words.road_row(one, facts) for one in single[:most]],
            "more_roads": max(len(single) - most, 0),
            "plan": words.plan_rows(told, facts),
            "notes": words.notes(told, facts),
        }

    return fitted_page("network.html", values, source=told.source, made_t_s=clock.wall_s())
