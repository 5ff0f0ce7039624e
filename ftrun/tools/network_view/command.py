"""`ftrun network`: the paths between a run's nodes, and the network plan.

Runs in:  cli. Changes nothing.
Takes in: the status of the run's agent; if the run has ended, `network.json` below its log folder.
Gives:    tables and text; a picture, a page or JSON.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from ftrun import clock
from ftrun.cli.commands.status import status_of
from ftrun.cli.runs import FoundRun, RunLiveness, choose
from ftrun.cli.screen.atomic_output import is_stdout, write_out
from ftrun.errors import ExitCode, FtrunError, UsageError
from ftrun.journal import NETWORK_NAME
from ftrun.tools.network_view import text as words
from ftrun.tools.network_view.facts import NetworkFacts, NetworkReport, network_facts
from ftrun.tools.report.report_logs import folder_of
from ftrun.wire.messages.status import NetworkStatus, StatusView, decode_status

_MOST_ROWS = 60


def network(
    run_id: str | None, *, as_json: bool = False, svg: str | None = None, html: str | None = None
) -> int:
    """Shows the paths of a run.

    Args:
        run_id: or the folder of its logs; None: the run that is alive, else the newest one here.
        as_json: print the network status instead of text.
        svg: file for the picture.
        html: file for the page.

    Raises:
        UsageError: several runs are alive and none is named; two documents for stdout.
        FtrunError: no such run, or it has no network status; a file cannot be written.
    """
    named = ((svg, "--svg"), (html, "--html"))
    files = [("-" if is_stdout(path) else path, flag) for path, flag in named if path]
    on_stdout = [path for path, _ in files].count("-") + as_json
    if on_stdout > 1:
        raise UsageError(
            "only one of --json, --svg - and --html - can have stdout. Name files for the others"
        )
    report = report_of(run_id, below=Path.cwd())
    facts = network_facts(report.part)
    for path, flag in files:
        write_out(path, svg_of(facts) if flag == "--svg" else html_of(report, facts), flag=flag)
    if as_json:
        document = {"run_id": report.run_id, "is_live": report.is_live}
        document |= msgspec.to_builtins(report.part)
        write_out(None, json.dumps(document, indent=1) + "\n")
    elif not on_stdout:
        words.show_network(report, facts)
        write_out(None, "".join(f"{path}\n" for path, _ in files))
    return ExitCode.DONE


def svg_of(facts: NetworkFacts) -> str:
    """The picture as a file of its own."""
    from ftrun.tools.network_view.picture import picture
    from ftrun.tools.report.render.page import picture_style

    return f"{picture(facts, picture_style())}\n"


def html_of(report: NetworkReport, facts: NetworkFacts) -> str:
    """The complete page."""
    from ftrun.tools.network_view.picture import FEW_DRAWN, picture
    from ftrun.tools.report.render.page import fitted_page

    is_few = len(facts.nodes) <= words.FEW
    rails = words.matrix_rails(facts) if is_few else []

    def values(share: float) -> dict[str, Any]:
        most = max(int(_MOST_ROWS * share), 8)
        nodes = [] if is_few else words.worst_nodes(facts)
        single = facts.single()
        return {
            "run_id": report.run_id,
            "verdict": words.verdict(report, facts),
            "survey": words.survey_words(report, facts),
            "effect": words.effect(report.part),
            "is_applied": report.part.is_applied,
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

    Args:
        name: a run id, or the folder of its logs; None: the run that is alive, else the one with
            the newest journal.
        below: where `ftrun-logs` is searched.

    Raises:
        UsageError: several runs are alive and none is named.
        FtrunError: there is no such run, or it has no network status.
        PeerError: the agent does not answer.
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
        document = path.read_bytes()
    except OSError as error:
        raise FtrunError(f"{path} cannot be read: {error}") from error
    part = decode_status(document, NetworkStatus, source=str(path))
    return NetworkReport(folder.name, part, is_live=False, source=str(path))
