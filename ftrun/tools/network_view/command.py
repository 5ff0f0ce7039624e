"""`ftrun network`: the paths between a run's nodes, and the network plan.

It reads the status of the run's agent; if the run has ended, `network.json` below its log folder.
"""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ftrun import clock
from ftrun.cli.commands.status import status_of
from ftrun.cli.completion import AsJson, RunIdArgument, option
from ftrun.cli.runs import FoundRun, RunLiveness, choose
from ftrun.cli.screen.atomic_output import requested_files, write_outputs
from ftrun.errors import FtrunError, UsageError
from ftrun.journal import NETWORK_NAME
from ftrun.tools.network_view import text as words
from ftrun.tools.network_view.facts import NetworkFacts, NetworkReport, network_facts
from ftrun.tools.network_view.picture import FEW_DRAWN, picture
from ftrun.tools.report.command import folder_of
from ftrun.tools.report.render.page import fitted_page, picture_style
from ftrun.wire.messages.status import NetworkStatus, StatusView, decode_status

_MOST_ROWS = 60


app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def network(
    run_id: RunIdArgument = None,
    as_json: AsJson = False,
    svg: Annotated[str | None, option("--svg", "the picture; - for stdout", "FILE")] = None,
    html: Annotated[str | None, option("--html", "all as one page; - for stdout", "FILE")] = None,
) -> None:
    """Show the paths between a run's nodes, and the network plan."""
    files = requested_files(svg, html, as_json=as_json)
    report = report_of(run_id, below=Path.cwd())
    facts = network_facts(report.part)
    document = {"run_id": report.run_id, "is_live": report.is_live}
    write_outputs(
        files,
        {
            "--svg": lambda: f"{picture(facts, picture_style())}\n",
            "--html": lambda: _html(report, facts),
        },
        document=(lambda: document | msgspec.to_builtins(report.part)) if as_json else None,
        show=lambda: words.show_network(report, facts),
    )


def _html(report: NetworkReport, facts: NetworkFacts) -> str:
    is_few = len(facts.nodes) <= words.FEW
    rails = words.matrix_rails(facts) if is_few else []

    def values(share: float) -> dict[str, Any]:
        most = max(int(_MOST_ROWS * share), 8)
        nodes = [] if is_few else words.worst_nodes(facts)
        single = facts.single()
        return {
            "run_id": report.run_id,
            "verdict": words.verdict(report, facts),
            "survey": words.survey_text(report, facts),
            "dead": sum(one.dead for one in facts.rail_facts),
            "slow": sum(one.slow for one in facts.rail_facts),
            "picture": picture(facts),
            "caption": words.caption(facts, is_few=len(facts.nodes) <= FEW_DRAWN),
            "findings": words.findings(report.part)[:most],
            "rail_head": words.RAIL_HEAD,
            "rail_rows": [words.rail_row(one, report.part) for one in facts.rail_facts],
            "names": facts.nodes,
            "cells": words.CELLS,
            "matrices": [(rail, words.matrix(facts, rail)) for rail in rails],
            "node_head": words.NODE_HEAD,
            "nodes_title": words.nodes_title(nodes),
            "node_rows": [words.node_row(one, facts) for one in nodes[:most]],
            "path_head": words.PATH_HEAD,
            "paths_title": words.SINGLE_PATHS,
            "path_rows": [words.path_row(one, facts) for one in single[:most]],
            "more_paths": max(len(single) - most, 0),
            "plan": words.plan_rows(report, facts),
            "notes": words.notes(report, facts),
        }

    return fitted_page("network.html", values, source=report.source, made_t_s=clock.wall_s())


def report_of(name: str | None, *, below: Path) -> NetworkReport:
    """Queries the run, or reads the file of a run that has ended.

    Without a name it is the run that is alive, else the one with the newest journal.
    """
    run, reason = _alive(name)
    if run is not None and run.life is RunLiveness.RUNNING:
        view = status_of(run)
        if view.cluster is None or view.cluster.network is None:
            raise FtrunError(f"run {run.name} {_without_network(view)}")
        source = f"run {run.name}"
        return NetworkReport(run.run_id, view.cluster.network, is_live=True, source=source)
    try:
        folder = folder_of(name, below=below)
    except UsageError as error:
        raise FtrunError(f"{reason or error}. No file of it was found either: {error}") from error
    return _kept(folder)


def _alive(name: str | None) -> tuple[FoundRun | None, str]:
    """Returns the run, or the reason why there is none."""
    try:
        return choose(name, command="network"), ""
    except UsageError:
        if name is None or "/" not in name:
            raise
        return None, ""  # a folder
    except FtrunError as error:
        return None, str(error)


def _without_network(view: StatusView) -> str:
    if view.cluster is None:
        return "runs on one node: there are no paths between nodes"
    return (
        "has not surveyed its network yet. The survey runs before the first generation, unless "
        "--network-plan off is set"
    )


def _kept(folder: Path) -> NetworkReport:
    """Reads the newest file of all nodes that were the leader."""
    paths = [folder / NETWORK_NAME, *folder.glob(f"*/{NETWORK_NAME}")]
    existing = [path for path in paths if path.is_file()]
    if not existing:
        raise FtrunError(
            f"{folder} has no {NETWORK_NAME}: the run was on one node, had --network-plan off, or "
            "its leader wrote to another disk; run the command on that node"
        )
    path = max(existing, key=lambda one: one.stat().st_mtime)
    try:
        part = decode_status(path.read_bytes(), NetworkStatus, source=str(path))
    except OSError as error:
        raise FtrunError(f"{path} cannot be read: {error}") from error
    return NetworkReport(folder.name, part, is_live=False, source=str(path))
