"""`ftrun network`: its tables, text and errors, from a running run and from a finished one.

The page of the docs shows the command's output.
"""

import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_networks import made_network
from typer.testing import CliRunner

from ftrun.cli.app import app
from ftrun.cli.run import take_folder
from ftrun.cli.screen import terminal as render
from ftrun.errors import ExitCode, FtrunError, PeerError, UsageError
from ftrun.journal import NETWORK_NAME
from ftrun.network.detect.probe_schedule import NetworkPath
from ftrun.tools.network_view import text as words
from ftrun.tools.network_view.facts import NetworkFacts, PathState, network_facts
from ftrun.wire.messages.envelope import StatusReply, StatusRequest
from ftrun.wire.messages.status import NetworkStatus
from ftrun.wire.transport.channel import accept, listen


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without runs, and no run that is alive."""
    (tmp_path / "runtime").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def keep(document: Any, *, run_id: str = "big-1", node: str = "node0") -> Path:
    """The files that an agent leaves of a finished run."""
    folder = Path("ftrun-logs") / run_id
    (folder / node).mkdir(parents=True, exist_ok=True)
    line = {"time": 1.0, "monotonic_s": 1.0, "node": node, "kind": "agent_started",
            "is_forked": True}  # fmt: skip
    (folder / node / "journal.jsonl").write_text(json.dumps(line) + "\n")
    path = folder / node / NETWORK_NAME
    path.write_text(json.dumps(document))
    return path


@contextmanager
def alive(document: dict[str, Any], *, run_id: str = "big-1") -> Iterator[None]:
    """A run whose agent answers with that status document."""
    folder, lock_fd = take_folder(run_id, script="train.py")
    server = listen(folder.agent_socket)

    def answer() -> None:
        # `answers` connects and disconnects; the next client sends the query.
        is_reported = False
        while not is_reported:
            channel = accept(server, run_id=run_id)
            assert channel is not None
            with suppress(PeerError):
                while not is_reported:
                    asked = channel.receive(deadline_s=5.0)
                    is_reported = isinstance(asked.body, StatusRequest)
                number = asked.envelope.question
                channel.send(StatusReply(json.dumps(document).encode()), question=number)
            channel.close()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(5.0)
        server.close()
        os.close(lock_fd)


def over_nodes(network: Any) -> dict[str, Any]:
    """The status of a run over several nodes."""
    known = {"state": "running", "summary": "running"}
    return {"run_id": "big-1", **known, "cluster": {**known, "network": network}}


def run(*line: str) -> str:
    """The command's output; errors are raised."""
    found = CliRunner().invoke(app, ["network", *line], catch_exceptions=False)
    assert found.exit_code == ExitCode.DONE, found.output
    return found.output


def facts_of(document: dict[str, Any]) -> NetworkFacts:
    return network_facts(msgspec.convert(document, NetworkStatus))


# --- the page of the docs ---------------------------------------------------------------------

EXAMPLE = json.loads((Path(__file__).parent / "networks" / "six-nodes.json").read_text())
"""Six nodes on two leaves; the paths between leaves have 0.4 of the rate, eth1 of node3 a tenth.
Made by `made_network(6, between=0.4, slow={("node3", "eth1")})`.
"""
DOCS = Path(__file__).parents[3] / "docs"


def test_the_example_is_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "NO_WIDTH", 120)  # as on a terminal of that width
    with alive(over_nodes(EXAMPLE)):
        printed = run("big-1")
    page = (DOCS / "network.md").read_text()
    assert f"```\n$ ftrun network big-1\n{printed}```\n" in page


def test_the_picture_is_what_the_command_draws() -> None:
    keep(EXAMPLE)
    assert run("--svg", "-") == (DOCS / "network.svg").read_text()


# --- sources ----------------------------------------------------------------------------------


def test_a_run_that_is_alive_is_asked() -> None:
    with alive(over_nodes(made_network(4))):
        reported = run()
    assert reported.startswith("run big-1: no path is slow or dead")
    assert "probed in 1.20 s, 33.0 s ago" in reported
    assert "the values are from" not in reported


def test_a_run_that_is_over_has_left_it(here: Path) -> None:
    path = keep(made_network(4))
    for name in ([], ["big-1"], [str(here / "ftrun-logs" / "big-1")]):
        reported = run(*name)
        assert reported.startswith("run big-1: no path is slow or dead")
        assert f"the values are from {here / path}" in reported
        assert "33.0 s ago" not in reported


def test_the_newest_of_several_leads_counts() -> None:
    old, new = keep(made_network(4)), keep(made_network(6), node="node1")
    os.utime(old, (1e9, 1e9))
    assert "6 nodes" in run("big-1")
    os.utime(new, (9e8, 9e8))
    assert "4 nodes" in run("big-1")


@pytest.mark.parametrize(
    ("document", "reported"),
    [
        ({**over_nodes(None), "cluster": None}, "runs on one node"),
        (over_nodes(None), "has not surveyed its network yet"),
    ],
)
def test_what_a_live_run_does_not_know_is_reported(document: dict[str, Any], reported: str) -> None:
    with alive(document), pytest.raises(FtrunError) as caught:
        run("big-1")
    assert reported in str(caught.value)


def test_no_run_is_reported_with_where_it_was_looked_for() -> None:
    with pytest.raises(FtrunError) as caught:
        run("none-such")
    assert "no run none-such is alive on this machine" in str(caught.value)
    assert "no journal of run none-such" in str(caught.value)


def test_a_run_that_kept_nothing_reports_why() -> None:
    keep({}).unlink()
    with pytest.raises(FtrunError) as caught:
        run("big-1")
    assert "--network-plan off" in str(caught.value)


@pytest.mark.parametrize("text", ['{"paths": 3}', "[]", "no json"])
def test_a_file_of_another_form_is_refused(text: str) -> None:
    keep({}).write_text(text)
    with pytest.raises(FtrunError) as caught:
        run("big-1")
    assert NETWORK_NAME in str(caught.value)


# --- text -------------------------------------------------------------------------------------


def test_a_few_nodes_have_every_path() -> None:
    keep(made_network(4, dead={("node3", "eth1")}, slow={("node2", "eth0")}))
    reported = run()
    assert "of 24 paths, 6 dead and 6 slow; the plan is not applied" in reported
    assert re.search(r"^3 node3 +dead +dead +dead *$", reported, re.MULTILINE)
    # node2 is the second node of the order: leaf0 has node0 and node2.
    assert re.search(r"^0 node0 +\d+! \d+ ", reported, re.MULTILINE)
    assert "!: slower than similar paths" in reported
    assert "- node3 cannot reach or be reached by any other node over eth1" in reported


def test_many_nodes_have_their_worst() -> None:
    document = made_network(
        64, leaves=8, slow={("node6", "eth1")}, dead={("node50", "eth0")},
        cut={("node2", "node5", "eth0")}, every=3,
    )  # fmt: skip
    keep(document)
    reported = run()
    assert "from \\ to" not in reported
    bad = reported.partition("bad rails of nodes:")[2].partition("\n\n")[0].splitlines()[2:]
    assert [line.split()[:3] for line in bad] == [
        ["node50", "leaf2", "eth0"], ["node6", "leaf6", "eth1"]]  # fmt: skip
    assert [line.split()[-1] for line in bad] == ["dead", "slow"]
    single = reported.partition("without another fault:")[2].partition("\n\n")[0].splitlines()[2:]
    assert [line.split()[:4] for line in single] == [["node2", "to", "node5", "eth0"]]
    assert "32.3 % of all paths probed" in reported
    assert "paths that were not probed" in reported


def test_many_nodes_that_are_well_have_their_slowest() -> None:
    keep(made_network(24))
    reported = run()
    assert "no path is slow or dead" in reported
    rows = (
        reported.partition("the slowest rails of nodes:")[2].partition("\n\n")[0].splitlines()[2:]
    )
    assert len(rows) == 12


def test_a_single_path_is_no_nodes_fault() -> None:
    facts = facts_of(made_network(6, cut={("node1", "node4", "eth1")}))
    assert facts.single() == [NetworkPath("node1", "node4", "eth1")]
    assert {one.state for one in facts.node_rails.values()} == {PathState.GOOD}
    assert facts.node_rails["node1", "eth1"].dead == 1


def test_what_a_node_does_wrong_one_way_is_reported() -> None:
    document = made_network(6)
    for path in document["paths"]:
        if (path["source"], path["rail"]) == ("node2", "eth0"):
            path["bytes_per_s"] /= 20
    facts = facts_of(document)
    found = facts.node_rails["node2", "eth0"]
    assert (found.sends, found.receives) == (PathState.SLOW, PathState.GOOD)
    assert words.remark(found) == "sending slow"


def test_a_narrow_uplink_is_no_nodes_fault() -> None:
    facts = facts_of(made_network(8, between=0.1))
    assert facts.count(PathState.SLOW) == 0
    assert facts.node_rails["node0", "eth0"].sends_per_s > 1e9


def test_the_plan_is_reported_with_its_reasons() -> None:
    keep(made_network(8, slow={("node6", "eth1")}, mode="on", is_applied=True))
    reported = " ".join(run().split())
    assert "plan the plan is applied" in reported
    order = reported.partition(" order ")[2].partition(" leaves ")[0]
    leaves = [{int(one[4:]) % 2 for one in part.split(", ")} for part in order.split(" | ")]
    assert leaves in ([{0}, {1}], [{0}, {1}, {0}])
    assert "(by the nodes' labels)" in reported
    assert "training over eth0, not over eth1" in reported
    assert "reasons Training uses eth0" in reported


@pytest.mark.parametrize(
    ("more", "reported"),
    [
        ({"mode": "off", "paths": []}, "not surveyed: --network-plan off"),
        ({"paths": []}, "no path was probed"),
        ({"mode": "on"}, "will be applied in the next generation"),
        ({"is_applied": True}, "the plan is applied"),
        ({}, "not applied (--network-plan report)"),
    ],
)
def test_the_first_line_reports_what_holds(more: dict[str, Any], reported: str) -> None:
    keep(made_network(3) | more)
    assert reported in run().splitlines()[0]


def test_a_rail_that_some_nodes_lack_and_a_path_without_a_rate() -> None:
    document = made_network(3, leaves=0)
    document["rails"]["node2"].pop()
    paths = [
        one for one in document["paths"] if "node2" not in one.values() or one["rail"] == "eth0"
    ]
    paths[0] |= {"bytes_per_s": 0.0, "problem": "the transfer made no progress"}
    keep(document | {"paths": paths})
    reported = run()
    assert re.search(r"^2 node2 +\? +\? *$", reported, re.MULTILINE)
    assert "?! " in reported
    assert "1 slow" in reported


def test_differing_interfaces_are_shown_in_the_table() -> None:
    document = made_network(3)
    document["rails"]["node1"][0] |= {"speed_mbit": 1000, "duplex": "half"}
    part = msgspec.convert(document, NetworkStatus)
    row = words.rail_row(network_facts(part).rail_facts[0], part)
    assert "1,000 to 10,000 Mbit/s, some half duplex" in row


def test_of_thousands_of_nodes_the_worst_are_kept_and_reported() -> None:
    document = made_network(600, every=151, leaves=20)
    by_rate = sorted(document["paths"], key=lambda path: path["bytes_per_s"])
    keep(document | {"coverage": 0.01, "paths": by_rate[:1000], "num_paths": len(by_rate)})
    reported = run()
    assert f"of {len(by_rate):,} probed paths, only the worst 1,000 are known" in reported
    assert "4 leaf switches more" in reported


def test_json_is_what_the_run_has_reported() -> None:
    document = made_network(3)
    with alive(over_nodes(document)):
        found = json.loads(run("--json"))
    part = msgspec.convert(document, NetworkStatus)
    expected = {"run_id": "big-1", "is_live": True} | json.loads(msgspec.json.encode(part))
    assert found == expected


def test_one_document_can_have_stdout() -> None:
    keep(made_network(3))
    with pytest.raises(UsageError) as caught:
        run("--json", "--svg", "-")
    assert "can have stdout" in str(caught.value)


# --- words ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "reported"),
    [
        ([], ""),
        (["a"], "a"),
        (["node0", "node1"], "node0, node1"),
        (["node0", "node1", "node2"], "node0-node2"),
        (["node8", "node9", "node10", "x"], "node8-node10, x"),
        (["n08", "n09", "n10"], "n08-n10"),
        (["n8", "n09"], "n8, n09"),
        (["n0", "n2", "n4", "n6"], "n0, n2, n4, n6"),
        (["n0", "n2", "n4", "n6", "n8", "a"], "n0-n8 by 2, a"),
        (["n2", "n1", "n0"], "n2, n1, n0"),
    ],
)
def test_names_that_count_up_are_folded(names: list[str], reported: str) -> None:
    assert words.folded(names) == reported


@pytest.mark.parametrize(
    ("seconds", "reported"),
    [(0.0, "-"), (82e-6, "82 us"), (0.00124, "1.24 ms"), (2.05, "2.05 s")],
)
def test_round_trips_in_words(seconds: float, reported: str) -> None:
    assert words.round_trip(seconds) == reported
