"""A training that only calls dcp.save and dcp.load loses a rank or a node of several.

Other ranks on other nodes must read what DCP gives to one rank: from a living node, or from parity.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from bench_common import Deadline
from nodes_run import NodesRun
from virtual_cluster import VirtualCluster, available

from tests.integration.conftest import Start
from tests.integration.test_dcp import LOOP, example, undisturbed

if reason := available():
    pytest.skip(f"needs namespaces: {reason}", allow_module_level=True)

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]

STEPS = 60
NOTES = """
import json, pathlib, socket, time
notes = open(f"rank{dist.get_rank()}.jsonl", "a", buffering=1)

def note(kind, **more):
    where = {"generation": generation, "node": socket.gethostname(), "pid": os.getpid()}
    line = {"ns": time.monotonic_ns(), "kind": kind, **where, **more}
    notes.write(json.dumps(line) + "\\n")

note("begun", step=training.step)
"""
PACE = """    note("step", step=training.step)
    if not pathlib.Path("go").exists():
        time.sleep(0.1)
"""


@pytest.mark.parametrize("fault", ["rank", "node"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_another_node_has_what_a_rank_needs(
    start: Start, script: Callable[..., str], tmp_path: Path, kind: str, fault: str
) -> None:
    text = example(kills=PACE).replace(LOOP, NOTES + LOOP)
    text = text.replace('report_state("ends")\n', 'note("end", result=report_state("ends"))\n')
    words = [script(text), kind, STEPS]
    with VirtualCluster(3) as cluster:
        run = NodesRun(cluster, tmp_path, words, Deadline(600), members=2, spares=1)
        run.start_all()
        run.wait_for_step(10)
        if fault == "rank":
            run.signal(run.node_of(1), "rank")
        else:
            run.fault("kill", run.node_of(1))
        run.wait_for_generation(1)
        run.finish()
        started = [reader.of("begun", 1)[0]["step"] for reader in run.readers]
        ends = {reader.of("end")[-1]["result"] for reader in run.readers}
    assert started[0] == started[1] >= 8
    assert ends == {undisturbed(start, script, kind, STEPS)}
