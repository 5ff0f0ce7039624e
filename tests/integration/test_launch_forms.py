"""Two nodes find each other with every form that torchrun accepts; errors if they do not.

Each form is started under torchrun too, on the same two nodes. The variables of the ranks must be
equal, except for those named here.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from virtual_cluster import VirtualCluster, available

if reason := available():
    pytest.skip(f"needs namespaces: {reason}", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "integration" / "scripts" / "ranks_on_nodes.py"
PAGE = ROOT / "docs" / "many-nodes.md"
WAIT_S = 600.0
NODES = (0, 1)

NOT_THE_SAME = {
    "MASTER_PORT": "a free one, as each generation has a store of its own",
    "MASTER_ADDR": "compared as a node: torchrun has it as it was given",
    "TORCHELASTIC_RUN_ID": "torchrun's is `none` where no --rdzv-id is given",
    "TORCHELASTIC_ERROR_FILE": "in another folder",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "ftrun handles signals itself",
}


class Launch:
    """Launchers on the nodes, with outputs of their own. Every wait is bounded."""

    def __init__(self, cluster: VirtualCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(
        self,
        node: int,
        *words: object,
        env: Mapping[str, str] | None = None,
        launcher: tuple[str, ...] = ("-m", "ftrun"),
        steps: int = 2,
    ) -> None:
        own = ("FTRUN_", "PET_", "SLURM_", "OMP_")
        variables = {k: v for k, v in os.environ.items() if not k.startswith(own)}
        variables |= {"PYTHONUNBUFFERED": "1", "TMPDIR": str(self.folder), **(env or {})}
        command = [sys.executable, *launcher, *words, SCRIPT, self.folder, steps]
        with self._output(node).open("ab") as output:
            self.processes[node] = self.cluster.run(
                node,
                [str(word) for word in command],
                env=variables,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def code(self, node: int) -> int:
        try:
            return self.processes[node].wait(WAIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"node{node} still runs after {WAIT_S} s:\n{self.all_text}")

    def wait_for_text(self, node: int, pattern: str) -> None:
        give_up_s = time.monotonic() + WAIT_S
        while not re.search(pattern, self.text(node)):
            assert time.monotonic() < give_up_s, f"no {pattern!r} of node{node}:\n{self.all_text}"
            has_ended = self.processes[node].poll() is not None
            assert not has_ended or re.search(pattern, self.text(node)), self.all_text
            time.sleep(0.05)

    def text(self, node: int) -> str:
        return self._output(node).read_text(errors="replace")

    @property
    def all_text(self) -> str:
        return "\n".join(f"node{node}:\n{self.text(node)}" for node in self.processes)

    def started(self) -> dict[int, dict[str, Any]]:
        """The first record of each rank, by rank: its node and its variables."""
        found = {}
        for path in self.folder.glob("rank*.jsonl"):
            note = json.loads(path.read_text().splitlines()[0])
            found[int(note["given"]["RANK"])] = note
        return found

    def _output(self, node: int) -> Path:
        return self.folder / f"node{node}.output"


@pytest.fixture(scope="module")
def cluster() -> Iterator[VirtualCluster]:
    with VirtualCluster(3, shm="64m") as made:
        yield made


@pytest.fixture
def launch(cluster: VirtualCluster, tmp_path: Path) -> Iterator[Callable[[str], Launch]]:
    """A fresh launch in a folder of its own; all processes on all nodes end with the test."""

    def make(name: str = "run") -> Launch:
        folder = tmp_path / name
        folder.mkdir()
        return Launch(cluster, folder)

    yield make
    for node in cluster.nodes():
        cluster.reset(node.name)


def secret(folder: Path, name: str = "secret") -> Path:
    path = folder / name
    path.touch(0o600)
    path.write_bytes(os.urandom(32))
    return path


# --- the forms ------------------------------------------------------------------------------------

Form = Callable[[int, str], tuple[list[str], dict[str, str]]]
"""Words and variables of one node, given its number and the address of the first."""


def static(node: int, host: str) -> tuple[list[str], dict[str, str]]:
    words = ["--nnodes=2", f"--node-rank={node}", f"--master-addr={host}", "--master-port=23456"]
    return [*words, "--nproc-per-node=2"], {}


def c10d(node: int, host: str) -> tuple[list[str], dict[str, str]]:
    words = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={host}:23456", "--rdzv-id=job9"]
    return [*words, "--nproc-per-node=2"], {}


def pytorchjob(node: int, host: str) -> tuple[list[str], dict[str, str]]:
    """The variables of each pod from the operator for PyTorchJobs, or from a TrainJob."""
    names = {"NNODES": "2", "NPROC_PER_NODE": "2", "NODE_RANK": str(node)}
    names |= {"MASTER_ADDR": "node0", "MASTER_PORT": "23456"}
    plain = {"MASTER_ADDR": "node0", "MASTER_PORT": "23456", "WORLD_SIZE": "2", "RANK": str(node)}
    return [], {**{f"PET_{key}": value for key, value in names.items()}, **plain}


def elastic_pytorchjob(node: int, host: str) -> tuple[list[str], dict[str, str]]:
    """The same, with an elasticPolicy."""
    names = {"NNODES": "2:3", "NPROC_PER_NODE": "2", "MAX_RESTARTS": "3"}
    names |= {"RDZV_BACKEND": "c10d", "RDZV_ENDPOINT": "node0:23456", "RDZV_ID": "job9"}
    names |= {"RDZV_CONF": "last_call_timeout=1,join_timeout=100"}
    return [], {f"PET_{key}": value for key, value in names.items()}


@pytest.mark.full
@pytest.mark.parametrize("form", [static, c10d, pytorchjob, elastic_pytorchjob])
def test_ranks_are_given_what_torchrun_gives_them(
    launch: Callable[[str], Launch], cluster: VirtualCluster, form: Form
) -> None:
    found = {}
    for name, launcher in (
        ("torchrun", ("-m", "torch.distributed.run")),
        ("ftrun", ("-m", "ftrun")),
    ):
        run = launch(name)
        for node in NODES:
            words, variables = form(node, cluster.address(0))
            run.start(node, *words, env=variables, launcher=launcher)
        codes = [run.code(node) for node in NODES]
        assert codes == [0, 0], run.all_text
        found[name] = run.started()
    theirs, ours = found["torchrun"], found["ftrun"]
    assert sorted(theirs) == sorted(ours) == [0, 1, 2, 3]
    for rank in theirs:
        expected = comparable(theirs[rank]["given"])
        assert comparable(ours[rank]["given"]) == expected
        # Without an endpoint, torchrun's result depends on the first node to start; ftrun's does
        # not.
        assert ours[rank]["node"] == f"node{rank // 2}"
        if form in (static, pytorchjob):
            assert theirs[rank]["node"] == ours[rank]["node"]
    masters = {note["given"]["MASTER_ADDR"] for note in ours.values()}
    assert masters == {cluster.address(0)}
    words, variables = form(0, "")
    named = variables.get("PET_RDZV_ID") or ("job9" if "--rdzv-id=job9" in words else None)
    run_id = named or "ranks_on_nodes-port23456"
    assert {note["given"]["TORCHELASTIC_RUN_ID"] for note in ours.values()} == {run_id}


def comparable(given: Mapping[str, str]) -> dict[str, str]:
    """The variables that must be equal; of a folder named after the launcher, its last part."""
    left = {key: value for key, value in given.items() if not key.startswith("FTRUN_")}
    kept = {key: value for key, value in left.items() if key not in NOT_THE_SAME}
    for key in ("PWD", "OLDPWD", "TMPDIR"):
        kept.pop(key, None)
    return kept


@pytest.mark.full
def test_nodes_with_a_secret_trust_each_other_and_report_it(
    launch: Callable[[str], Launch],
) -> None:
    run = launch("run")
    path = secret(run.folder)
    words, variables = pytorchjob(0, "")
    run.start(0, "--secret-file", path, *words, env=variables)
    words, variables = pytorchjob(1, "")
    run.start(1, *words, env={**variables, "FTRUN_SECRET_FILE": str(path)})
    assert [run.code(node) for node in NODES] == [0, 0], run.all_text
    assert "UNAUTHENTICATED" not in run.all_text


@pytest.mark.full
def test_a_pod_waits_until_its_name_has_an_address(
    launch: Callable[[str], Launch], cluster: VirtualCluster
) -> None:
    """In Kubernetes a pod may run before the names of the job have an address."""
    run = launch("run")
    for node in NODES:
        words, variables = pytorchjob(node, "")
        variables |= {"PET_MASTER_ADDR": "train-node-0-0.train"}
        run.start(node, *words, env=variables)
    for node in NODES:
        run.wait_for_text(node, "train-node-0-0.train .*no address; looking for it for 600 s")
    name = f"{cluster.address(0)} train-node-0-0.train"
    done = cluster.run(0, ["sh", "-c", f"echo '{name}' >> /etc/hosts"])  # of all nodes
    assert done.wait(WAIT_S) == 0
    assert [run.code(node) for node in NODES] == [0, 0], run.all_text
    assert {rank: note["node"] for rank, note in run.started().items()} == {
        0: "node0",
        1: "node0",
        2: "node1",
        3: "node1",
    }


@pytest.mark.full
def test_the_manifest_of_the_page_makes_one_run(
    launch: Callable[[str], Launch], cluster: VirtualCluster
) -> None:
    """Its command and variables, with three pods for its five, without Kubernetes."""
    (block,) = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    service, job = yaml.safe_load_all(block)
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    (container,) = pod["containers"]
    run = launch("run")
    here = {"/secret/run": secret(run.folder), "/shared": run.folder / "checkpoints"}
    launcher, *words, script = [here.get(word, word) for word in container["command"]]
    assert (launcher, script) == ("ftrun", "train.py")
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert (
        int(variables["PET_NNODES"]) + int(words[words.index("--spares") + 1])
        == (job["spec"]["completions"])
    )
    variables |= {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"}
    host, _, _ = variables["PET_RDZV_ENDPOINT"].partition(":")
    name = f"{cluster.address(0)} {host}"
    assert cluster.run(0, ["sh", "-c", f"echo '{name}' >> /etc/hosts"]).wait(WAIT_S) == 0
    for node in range(3):
        run.start(node, *words, env=variables)
    assert [run.code(node) for node in range(3)] == [0, 0, 0], run.all_text
    assert {note["node"] for note in run.started().values()} == {"node0", "node1"}
    assert "UNAUTHENTICATED" not in run.all_text


# --- errors -----------------------------------------------------------------------------------


def at(cluster: VirtualCluster, *more: object, node: int = 0) -> list[object]:
    return ["--nnodes=2", f"--rdzv-endpoint={cluster.address(node)}:23456", *more]


@pytest.mark.full
def test_an_endpoint_without_a_listener(
    launch: Callable[[str], Launch], cluster: VirtualCluster
) -> None:
    run = launch("run")
    run.start(0, *at(cluster, "--rdzv-conf", "join_timeout=5", node=1))
    assert run.code(0) == 75
    host = cluster.address(1)
    says = f"no run has accepted this node within 5 s: {host} port 23456 refuses the connection"
    assert says in run.text(0)
    assert f"Check that ftrun runs on {host}" in run.text(0)


@pytest.mark.full
def test_an_endpoint_where_no_node_comes(
    launch: Callable[[str], Launch], cluster: VirtualCluster
) -> None:
    run = launch("run")
    run.start(0, *at(cluster, "--rdzv-conf", "join_timeout=2"))
    assert run.code(0) == 76
    assert "within 2 s: node0 is here, and 2 nodes are needed. Check" in run.text(0)


@pytest.mark.full
def test_an_endpoint_that_has_no_address(launch: Callable[[str], Launch]) -> None:
    run = launch("run")
    words = ["--nnodes=2", "--rdzv-endpoint=nowhere.invalid"]
    run.start(0, *words, "--rdzv-conf", "join_timeout=2")
    assert run.code(0) == 75
    assert "the endpoint is not found within" in run.text(0)
    assert "Check the name in --rdzv-endpoint or --master-addr on node node0" in run.text(0)


@pytest.mark.full
def test_two_nodes_of_one_name(launch: Callable[[str], Launch], cluster: VirtualCluster) -> None:
    run = launch("run")
    run.start(0, *at(cluster, "--node-id=twin"))
    run.start(1, *at(cluster, "--node-id=twin"))
    assert run.code(1) == 2
    assert "both nodes are named twin. Name each one differently with --node-id" in run.text(1)
    run.wait_for_text(0, "is refused: .* both nodes are named twin")


@pytest.mark.full
def test_two_nodes_of_one_name_at_a_third(
    launch: Callable[[str], Launch], cluster: VirtualCluster
) -> None:
    run = launch("run")
    words = ["--nnodes=3", f"--rdzv-endpoint={cluster.address(0)}:23456"]
    for node, name in enumerate(["one", "twin", "twin"]):
        run.start(node, *words, f"--node-id={name}")
    run.wait_for_text(0, "says it is node twin, and so does .* Name each node differently")
    one, other = run.processes[1], run.processes[2]
    give_up_s = time.monotonic() + WAIT_S
    while one.poll() is None and other.poll() is None:
        assert time.monotonic() < give_up_s, run.all_text
        time.sleep(0.05)
    turned_away, taken = (1, 2) if one.poll() is not None else (2, 1)
    assert run.code(turned_away) == 2
    assert "rejects this node" in run.text(turned_away)
    assert run.processes[taken].poll() is None


@pytest.mark.full
def test_other_numbers_of_nodes(launch: Callable[[str], Launch], cluster: VirtualCluster) -> None:
    run = launch("run")
    run.start(0, *at(cluster))
    run.start(1, *at(cluster, "--spares=1"))
    assert run.code(1) == 2
    assert "rejects this node: it was started with --nnodes/--spares" in run.text(1)
    assert "Give the same to every node" in run.text(1)


@pytest.mark.parametrize("has_one", [True, pytest.param(False, marks=pytest.mark.full)])
def test_another_secret_or_none(
    launch: Callable[[str], Launch], cluster: VirtualCluster, has_one: bool
) -> None:
    run = launch("run")
    run.start(0, *at(cluster, f"--secret-file={secret(run.folder)}"))
    other = [f"--secret-file={secret(run.folder, 'other')}"] if has_one else []
    run.start(1, *at(cluster, *other))
    assert run.code(1) == 2
    reason = "the secret differs" if has_one else "this side has no secret, and the other has one"
    assert f"{cluster.address(0)} port 23456 refuses us: {reason}" in run.text(1)
    assert "Use the same --secret-file on every node" in run.text(1)
    run.wait_for_text(0, f"{cluster.address(1)} port \\d+ is refused: ")


@pytest.mark.full
def test_another_version_of_ftrun(launch: Callable[[str], Launch], cluster: VirtualCluster) -> None:
    run = launch("run")
    older = run.folder / "older"
    shutil.copytree(ROOT / "ftrun", older / "ftrun")
    init = older / "ftrun" / "__init__.py"
    found = re.findall(r'__version__ = "(.+)"', init.read_text())
    init.write_text(init.read_text().replace(found[0], "0.0.7"))
    run.start(0, *at(cluster))
    run.start(1, *at(cluster), env={"PYTHONPATH": str(older)}, launcher=("-P", "-m", "ftrun"))
    assert run.code(1) == 2
    assert f"it has ftrun {found[0]}, and this is ftrun 0.0.7. Install the same" in run.text(1)


def test_what_is_reported_before_anything_is_started(
    launch: Callable[[str], Launch], cluster: VirtualCluster
) -> None:
    run = launch("run")
    for words, said in (
        (["--bind", "0.0.0.0"], "--bind is '0.0.0.0', which means every address"),
        (["--bind", "10.9.9.9"], "which is no address of this machine (node0)"),
        (["--rdzv-endpoint", "[::]:23456"], "means every address of a machine"),
        (["--secret-file", "nowhere"], "cannot read the secret file .*nowhere"),
        (["--set", "security.require_secret=true"], "require_secret is set, and no --secret-file"),
        (["--rdzv-backend", "etcd-v2"], "This version has no others"),
    ):
        run.start(0, *at(cluster, *words))
        assert run.code(0) == 2
        assert re.search(re.escape(said).replace(r"\.\*", ".*"), run.text(0)), run.text(0)
