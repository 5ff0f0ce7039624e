"""The arguments on each node yield the same description of the run, or a readable error."""

import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from ftrun.cli.launch.command_line import parse
from ftrun.cli.launch.nodes import read_topology
from ftrun.cli.launch.slurm import leaf_switch
from ftrun.cli.run import build_spec, take_folder
from ftrun.config.cluster import EtcdTls, NodesSpec
from ftrun.config.run_spec import RunSpec
from ftrun.errors import FtrunError, UsageError
from ftrun.wire.run_environment import run_folder

SLURM = {
    "SLURM_CLUSTER_NAME": "big",
    "SLURM_JOB_ID": "100",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[01-05]",
    "SLURM_STEP_NUM_NODES": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURMD_NODENAME": "n03",
}
MEET = "--rdzv-endpoint n1 "


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "train.py").write_text("")
    return tmp_path


def spec(words: str, variables: Mapping[str, str] | None = None) -> RunSpec:
    return build_spec(parse([*words.split(), "train.py"]), variables=variables or {})


def nodes(words: str, variables: Mapping[str, str] | None = None) -> NodesSpec:
    found = spec(words, variables).nodes
    assert found is not None
    return found


def refused(words: str, variables: Mapping[str, str] | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        spec(words, variables)
    return str(caught.value)


# --- number of nodes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        ("", {}),
        ("--nnodes 1", {}),
        ("--nnodes 1:1", {}),
        ("--nnodes 1 --spares 0", {}),
        ("--nnodes 1", {"PET_NNODES": "4"}),
        ("--standalone", {}),
        ("--rdzv-backend etcd --rdzv-endpoint e:1 --master-addr x --node-rank 0", {}),
        ("", {"PET_NNODES": "1", "PET_MASTER_ADDR": "x", "PET_MASTER_PORT": "1"}),
        ("--nnodes 1", SLURM),
        ("--standalone", SLURM),
        ("", {**SLURM, "PET_NNODES": "1"}),
        ("", {**SLURM, "SLURM_STEP_NUM_TASKS": "40"}),
        ("", {**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}),
        ("--node-id me --secret-file none --erasure 2+1 --fault-domain r", {}),
    ],
)
def test_one_node_needs_nothing_of_this(words: str, variables: Mapping[str, str]) -> None:
    made = spec(words, variables)
    assert made.nodes is None
    assert made.folder_name == made.run_id
    assert made.log_folder.endswith(f"/ftrun-logs/{made.run_id}")


@pytest.mark.parametrize(
    ("words", "variables", "count"),
    [
        ("--nnodes 4", {}, (4, 4, 0)),
        ("--nnodes=2:4", {}, (2, 4, 0)),
        ("--nnodes 4 --spares 2", {}, (4, 4, 2)),
        ("--nnodes 1 --spares 1", {}, (1, 1, 1)),
        ("--spares 1", {}, (1, 1, 1)),
        ("--nnodes 1:3", {}, (1, 3, 0)),
        ("", {"PET_NNODES": "3"}, (3, 3, 0)),
        ("--nnodes 2", {"PET_NNODES": "3"}, (2, 2, 0)),
        ("--nnodes 2", {"FTRUN_SPARES": "1"}, (2, 2, 1)),
        ("--nnodes 2 --spares 0", {"FTRUN_SPARES": "1"}, (2, 2, 0)),
        ("", SLURM, (5, 5, 0)),
        ("--spares 1", SLURM, (4, 4, 1)),
        ("--spares 4", SLURM, (1, 1, 4)),
        ("--nnodes 3 --spares 1", SLURM, (3, 3, 1)),
        ("--nnodes 2:5", SLURM, (2, 5, 0)),
    ],
)
def test_members_and_spares(
    words: str, variables: Mapping[str, str], count: tuple[int, int, int]
) -> None:
    found = nodes(MEET + words, variables)
    assert (found.min_nodes, found.max_nodes, found.spares) == count


@pytest.mark.parametrize("text", ["0", "4:2", "0:2", "two", "1:2:3", "-1:2", "2:", "1.5"])
def test_a_number_of_nodes_that_is_none(text: str) -> None:
    said = refused(f"{MEET} --nnodes={text}")
    assert "--nnodes" in said
    assert text in said


def test_a_slurm_step_with_too_few_nodes_is_refused_if_no_others_can_join() -> None:
    assert "5 nodes, and 6 are needed" in refused("--nnodes 6", SLURM)
    assert nodes("--nnodes 5", SLURM).min_nodes == 5
    assert nodes(MEET + "--nnodes 6", SLURM).min_nodes == 6


@pytest.mark.parametrize(
    ("words", "variables", "part"),
    [
        ("--nnodes 2 --spares some", {}, "--spares"),
        ("--nnodes 2", {"FTRUN_SPARES": "-1"}, "FTRUN_SPARES"),
        ("--spares 5", SLURM, "5 nodes"),
        ("--nnodes 2 --standalone", {}, "--standalone"),
        ("--nnodes 2", {"PET_STANDALONE": "1"}, "PET_STANDALONE"),
        ("--nnodes 2 --node-rank x", {}, "--node-rank"),
    ],
)
def test_numbers_that_make_no_sense(words: str, variables: Mapping[str, str], part: str) -> None:
    assert part in refused(MEET + words, variables)


# --- endpoint ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "variables", "where"),
    [
        ("--rdzv-endpoint n1", {}, ("n1", 29400)),
        ("--rdzv_endpoint=n1.cluster:1234", {}, ("n1.cluster", 1234)),
        ("--rdzv-endpoint 10.0.0.7:7", {}, ("10.0.0.7", 7)),
        ("--rdzv-endpoint [fd00::7]:7", {}, ("fd00::7", 7)),
        ("--rdzv-endpoint [fd00::7]", {}, ("fd00::7", 29400)),
        ("--rdzv-endpoint fd00::7", {}, ("fd00::7", 29400)),
        ("", {"PET_RDZV_ENDPOINT": "n2:9"}, ("n2", 9)),
        ("--rdzv-endpoint n1:8", {"PET_RDZV_ENDPOINT": "n2:9"}, ("n1", 8)),
        ("--node-rank 0 --master-addr n3", {}, ("n3", 29500)),
        ("--master-addr n3 --master-port 6000", {}, ("n3", 6000)),
        ("--master_addr fd00::7 --master-port 6000", {}, ("fd00::7", 6000)),
        ("", {"PET_MASTER_ADDR": "n4", "PET_MASTER_PORT": "5"}, ("n4", 5)),
        ("--rdzv-endpoint n1:8 --master-addr n3", {}, ("n1", 8)),
        ("", SLURM, ("n01", 15000 + 100 * 101 % 10000)),
        ("--rdzv-endpoint n1:8", SLURM, ("n1", 8)),
        ("--master-addr n3", SLURM, ("n3", 29500)),
    ],
)
def test_where_they_meet(words: str, variables: Mapping[str, str], where: tuple[str, int]) -> None:
    found = nodes(f"--nnodes 2 {words}", variables)
    assert (found.endpoint_host, found.endpoint_port) == where
    assert found.more_endpoints == []


def test_nodes_may_meet_at_several_endpoints() -> None:
    found = nodes("--nnodes 2 --rdzv-endpoint n1:7,n2,[fd00::7]:8,n1:7")
    assert (found.endpoint_host, found.endpoint_port) == ("n1", 7)
    assert found.more_endpoints == [("n2", 29400), ("fd00::7", 8)]


def test_nowhere_to_meet_reports_what_to_give() -> None:
    said = refused("--nnodes 2:4")
    assert "--nnodes 2:4" in said
    assert "--rdzv-endpoint HOST" in said
    assert "srun" in said
    assert "--rdzv-endpoint" in refused("--spares 1")


@pytest.mark.parametrize(
    "words",
    [
        "--rdzv-endpoint n1:0",
        "--rdzv-endpoint n1:70000",
        "--rdzv-endpoint n1:http",
        "--rdzv-endpoint n1:",
        "--rdzv-endpoint :29400",
        "--rdzv-endpoint http://n1",
        "--rdzv-endpoint 0.0.0.0:29400",
        "--rdzv-endpoint [::]:29400",
        "--rdzv-endpoint ::",
        "--master-addr n1:29500",
        "--master-addr n1 --master-port x",
    ],
)
def test_a_place_that_is_none(words: str) -> None:
    said = refused(f"--nnodes 2 {words}")
    assert words.split()[0] in said or "--master-port" in said


@pytest.mark.parametrize("backend", ["c10d", "static", "ftrun"])
def test_torchruns_backends_mean_ours(backend: str) -> None:
    assert nodes(f"--nnodes 2 {MEET} --rdzv-backend {backend}").endpoint_host == "n1"


def test_another_backend_is_refused() -> None:
    said = refused(f"--nnodes 2 {MEET} --rdzv-backend etcd-v2")
    assert "etcd-v2" in said
    assert "PET_RDZV_BACKEND" in refused(f"--nnodes 2 {MEET}", {"PET_RDZV_BACKEND": "etcd-v2"})


@pytest.mark.parametrize(
    ("endpoint", "found"),
    [
        ("e0", ["e0:2379"]),
        ("e0:2380", ["e0:2380"]),
        ("e0:1,e1,[fd00::7]:9", ["e0:1", "e1:2379", "fd00::7:9"]),
    ],
)
def test_an_etcd_is_where_they_meet(endpoint: str, found: list[str]) -> None:
    made = spec(f"--nnodes 1:2 --rdzv-backend etcd --rdzv-id exp7 --rdzv-endpoint {endpoint}")
    assert made.run_id == "exp7"
    assert made.nodes is not None
    assert made.nodes.etcd == found
    host, _, port = found[0].rpartition(":")
    assert (made.nodes.endpoint_host, made.nodes.endpoint_port) == (host, int(port))
    assert nodes(f"--nnodes 2 {MEET}").etcd == []


@pytest.mark.parametrize(
    ("words", "variables", "part"),
    [
        ("--rdzv-id x", {}, "--rdzv-endpoint HOST, HOST:2379 or several"),
        ("--rdzv-id x", SLURM, "needs the cluster's client addresses"),
        (
            "--rdzv-id x --rdzv-endpoint https://e0:2379",
            {},
            "--rdzv-conf protocol=https, or cacert=FILE",
        ),
        ("--rdzv-id x --rdzv-endpoint e0,e1:x", {}, "the port of --rdzv-endpoint"),
        ("--rdzv-endpoint e0", {}, "Give --rdzv-id NAME"),
    ],
)
def test_an_etcd_that_cannot_be_asked(words: str, variables: Mapping[str, str], part: str) -> None:
    assert part in refused(f"--nnodes 2 --rdzv-backend etcd {words}", variables)


def test_a_run_in_slurm_has_a_name_of_its_own_in_an_etcd() -> None:
    made = spec("--rdzv-backend etcd --rdzv-endpoint e0", {**SLURM, "SLURM_RESTART_COUNT": "2"})
    assert made.run_id.startswith("train-job")
    assert made.nodes is not None
    assert made.nodes.etcd_life == 2, "the nodes of its last life do not join"


def test_tls_with_an_etcd_is_asked_for_as_with_torchrun_or_etcdctl(place: Path) -> None:
    for name in ("ca.pem", "node.pem", "node.key"):
        (place / name).write_text("")

    def tls(conf: str, variables: Mapping[str, str] | None = None) -> EtcdTls | None:
        words = f"--nnodes 2 --rdzv-backend etcd --rdzv-endpoint e0 --rdzv-id x {conf}"
        return nodes(words, variables).etcd_tls

    ca, cert, key = (str(place / name) for name in ("ca.pem", "node.pem", "node.key"))
    assert tls("") is None
    assert tls("--rdzv-conf protocol=https") == EtcdTls()
    assert tls("--rdzv-conf cacert=ca.pem,timeout=9") == EtcdTls(ca=ca)
    whole = EtcdTls(ca=ca, cert=cert, key=key)
    assert tls("--rdzv-conf cacert=ca.pem,cert=node.pem,key=node.key") == whole
    variables = {"ETCDCTL_CACERT": ca, "ETCDCTL_CERT": cert, "ETCDCTL_KEY": key}
    assert tls("", variables) == whole
    assert tls("", {**variables, "PET_RDZV_CONF": "cacert=node.pem"}) == EtcdTls(
        ca=cert, cert=cert, key=key
    )
    assert tls("--rdzv-conf protocol=http", variables) is None
    assert nodes(f"--nnodes 2 {MEET}", variables).etcd_tls is None


@pytest.mark.parametrize(
    ("conf", "variables", "said"),
    [
        ("cacert=none.pem", {}, "--rdzv-conf cacert is 'none.pem', and there is no such file"),
        ("", {"ETCDCTL_KEY": "/none"}, "ETCDCTL_KEY is '/none', and there is no such file"),
        ("cert=train.py", {}, "a cert is given and no key"),
        ("key=train.py", {}, "a key is given and no cert"),
        ("protocol=grpc", {}, "protocol is http or https, not 'grpc'"),
    ],
)
def test_tls_that_cannot_be_spoken(conf: str, variables: Mapping[str, str], said: str) -> None:
    words = "--nnodes 2 --rdzv-backend etcd --rdzv-endpoint e0 --rdzv-id x"
    assert said in refused(f"{words} --rdzv-conf x=1,{conf}", variables)


def test_an_etcd_needs_its_client_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = refused("--nnodes 2 --rdzv-backend etcd --rdzv-endpoint e0 --rdzv-id x")
    assert "pip install 'ftrun[etcd]'" in said


def test_waiting_may_be_set_as_with_torchrun() -> None:
    def waits(words: str, variables: Mapping[str, str] | None = None) -> tuple[float, float]:
        made = spec(f"--nnodes 2 {MEET} {words}", variables).profile.nodes
        return made.join_timeout_s, made.last_call_timeout_s

    assert waits("") == (600.0, 5.0)
    assert waits("--rdzv-conf join_timeout=60,last_call_timeout=2,read_timeout=9") == (60, 2)
    assert waits("--rdzv-conf timeout=70") == (70, 5)
    assert waits("--rdzv-conf timeout=70,join_timeout=60") == (60, 5)
    assert waits("--rdzv-conf join_timeout=60,timeout=70") == (60, 5)
    pet = {"PET_RDZV_CONF": "join_timeout=60"}
    assert waits("", pet) == (60, 5)
    assert waits("", {**pet, "FTRUN_NODES_JOIN_TIMEOUT_S": "50"}) == (50, 5)
    assert waits("--set nodes.join_timeout_s=40 --rdzv-conf join_timeout=60", pet) == (40, 5)
    assert "--rdzv-conf join_timeout" in refused(f"--nnodes 2 {MEET} --rdzv-conf join_timeout=x")


# --- node names -------------------------------------------------------------------------------


def test_a_node_is_named_after_its_machine() -> None:
    made = spec(f"--nnodes 2 {MEET}")
    assert made.nodes is not None
    assert made.nodes.node_id == socket.gethostname()
    assert not made.nodes.is_named
    assert made.nodes.node_rank is None
    assert made.folder_name == made.run_id
    assert made.log_folder.endswith(f"/ftrun-logs/{made.run_id}/{socket.gethostname()}")


def test_a_name_of_its_own_makes_a_run_folder_of_its_own(place: Path) -> None:
    made = spec(f"--nnodes 2 {MEET} --run-id r --node-id a --node-rank 3")
    assert made.nodes is not None
    assert made.nodes.node_id == "a"
    assert made.nodes.node_rank == 3
    assert made.folder_name == "r@a"
    assert made.log_folder == str(place / "ftrun-logs" / "r" / "a")
    assert nodes(f"--nnodes 2 {MEET}", {"FTRUN_NODE_ID": "b"}).node_id == "b"
    assert nodes(f"--nnodes 2 {MEET}", {"PET_NODE_RANK": "1"}).node_rank == 1
    assert "a/b" in refused(f"--nnodes 2 {MEET} --node-id a/b")
    assert "a@b" in refused(f"--nnodes 2 {MEET} --node-id a@b")


def test_two_nodes_of_a_run_on_one_machine_have_two_folders() -> None:
    held = [take_folder(name, script="/t.py") for name in ("r@a", "r@b")]
    folders = [folder for folder, _ in held]
    assert [folder.name for folder in folders] == ["r@a", "r@b"]
    assert [folder.run_id for folder in folders] == ["r", "r"]
    assert run_folder("r@a") == folders[0]
    with pytest.raises(UsageError) as caught:
        take_folder("r@a", script="/t.py")
    assert "run r@a is alive" in str(caught.value)
    for _, lock_fd in held:
        os.close(lock_fd)


def test_a_slurm_node_is_named_as_slurm_names_it() -> None:
    made = spec("", SLURM)
    assert made.nodes is not None
    assert made.nodes.node_id == "n03"
    assert made.nodes.is_named  # this machine is not n03: two such nodes may run on it
    here = spec("", {**SLURM, "SLURMD_NODENAME": socket.gethostname()})
    assert here.folder_name == here.run_id
    assert nodes("--node-id mine", SLURM).node_id == "mine"


def test_an_address_to_listen_at_must_be_ours() -> None:
    assert nodes(f"--nnodes 2 {MEET}").bind is None
    assert nodes(f"--nnodes 2 {MEET} --bind 127.0.0.1").bind == "127.0.0.1"
    assert nodes(f"--nnodes 2 {MEET} --local-addr 127.0.0.1").bind == "127.0.0.1"
    both = {"FTRUN_BIND": "127.0.0.2", "PET_LOCAL_ADDR": "127.0.0.1"}
    assert nodes(f"--nnodes 2 {MEET}", both).bind == "127.0.0.2"
    assert "192.0.2.1" in refused(f"--nnodes 2 {MEET} --bind 192.0.2.1")
    assert "every address" in refused(f"--nnodes 2 {MEET} --bind 0.0.0.0")
    assert "every address" in refused(f"--nnodes 2 {MEET} --bind ::")


def test_a_fault_domain_is_a_label() -> None:
    assert nodes(f"--nnodes 2 {MEET} --fault-domain rack-7").domain == "rack-7"
    assert nodes(f"--nnodes 2 {MEET}", {"FTRUN_FAULT_DOMAIN": "row 3"}).domain == "row 3"
    assert "FTRUN_FAULT_DOMAIN" in refused(f"--nnodes 2 {MEET}", {"FTRUN_FAULT_DOMAIN": "\x1b[2J"})


def test_all_nodes_find_the_same_run_id() -> None:
    def ids(words: str, *each: Mapping[str, str]) -> set[str]:
        return {spec(words, variables).run_id for variables in each}

    by_name = {"PET_RDZV_ENDPOINT": "n1:29400"}
    at_home = {"PET_RDZV_ENDPOINT": "localhost:29400"}
    assert ids("--nnodes 2", by_name, at_home) == {"train-port29400"}
    assert ids("", SLURM, {**SLURM, "SLURMD_NODENAME": "n04"}) == {"train-job100-0"}
    assert ids("--nnodes 2 --rdzv-id x", by_name) == {"x"}
    assert ids("--nnodes 2 --run-id y --rdzv-id x", by_name) == {"y"}
    assert len(ids("", {}, {"A": "1"})) == 2


# --- protection -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "scheme"),
    [
        ("", (None, None)),
        ("--erasure auto", (None, None)),
        ("--erasure none", (None, 0)),
        ("--erasure 4+2", (4, 2)),
        ("--erasure 32+16", (32, 16)),
        ("--set erasure.scheme=3+1", (3, 1)),
        ("--set erasure.scheme=3+1 --erasure none", (None, 0)),
        ("--erasure mirror", (None, 1)),
    ],
)
def test_erasure(words: str, scheme: tuple[int | None, int | None]) -> None:
    found = nodes(f"--nnodes 6 {MEET} {words}")
    assert (found.erasure_data, found.erasure_parity) == scheme
    assert found.erasure_ring == ("mirror" in words)


@pytest.mark.parametrize("text", ["4", "4+0", "0+1", "04+1", "4+-1", "4-2", "99+1", "4+17", "off"])
def test_an_erasure_scheme_that_is_none(text: str) -> None:
    said = refused(f"--nnodes 6 {MEET} --erasure {text}")
    assert "erasure.scheme" in said
    assert text in said


def test_times_must_let_a_node_stop_before_it_is_replaced() -> None:
    assert spec(f"--nnodes 2 {MEET} --pause-timeout 60").profile.nodes.pause_timeout_s == 60
    said = refused(f"--nnodes 2 {MEET} --set nodes.failure_timeout_s=1.5")
    assert "nodes.self_fencing_timeout_s (2)" in said
    assert "nodes.failure_timeout_s (1.5)" in said
    spec("--set nodes.failure_timeout_s=1.5")  # no other node to wait for


# --- the secret -----------------------------------------------------------------------------


def private(path: Path, text: str = "canary-canary-canary-canary-canary") -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_without_a_secret_the_run_reports_why() -> None:
    found = nodes(f"--nnodes 2 {MEET}")
    assert found.secret_file is None
    assert "/dev/urandom" in found.no_secret


def test_a_secret_file_is_named_and_never_shown(place: Path) -> None:
    path = private(place / "secret")
    made = [
        spec(f"--nnodes 2 {MEET} --secret-file secret"),
        spec(f"--nnodes 2 {MEET}", {"FTRUN_SECRET_FILE": str(path)}),
        spec(f"--nnodes 2 {MEET}", {"FTRUN_SECURITY_SECRET_FILE": "secret"}),
        spec(f"--nnodes 2 {MEET} --set security.secret_file=secret"),
        spec(f"--nnodes 2 {MEET} --secret-file secret", {"FTRUN_SECRET_FILE": "/other"}),
    ]
    for one in made:
        assert one.nodes is not None
        assert one.nodes.secret_file == str(path)
        assert not one.nodes.secret_is_ours
        assert "canary" not in msgspec.json.encode(one).decode()


def test_a_secret_file_that_is_none_is_refused_before_anything_starts(place: Path) -> None:
    assert "cannot read" in refused(f"--nnodes 2 {MEET} --secret-file nothing")
    (private(place / "open")).chmod(0o644)
    assert "chmod 600" in refused(f"--nnodes 2 {MEET} --secret-file open")
    said = refused(f"--nnodes 2 --secret-file {private(place / 'short', 'canary')} {MEET}")
    assert "is not a secret" in said
    assert "canary" not in said


def test_tilde_is_the_home_folder(place: Path) -> None:
    path = private(place / "home" / "s")
    found = nodes(f"--nnodes 2 {MEET} --set security.secret_file=~/s")
    assert found.secret_file == str(path)


def test_the_nodes_of_a_slurm_step_share_one_that_ftrun_makes(place: Path) -> None:
    one, other = nodes("", SLURM), nodes("", {**SLURM, "SLURMD_NODENAME": "n04"})
    assert one.secret_file == other.secret_file
    assert one.secret_is_ours
    assert one.secret_file is not None
    path = Path(one.secret_file)
    assert path == place / "home" / ".ftrun" / "secrets" / "big-100-0.secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert nodes("", {**SLURM, "SLURM_STEP_ID": "1"}).secret_file != one.secret_file
    mine = nodes(f"--secret-file {private(place / 's')}", SLURM)
    assert not mine.secret_is_ours


def test_a_slurm_step_without_a_home_continues_without_a_secret(place: Path) -> None:
    (place / "home").rmdir()
    (place / "home").write_text("no folder")
    found = nodes("", SLURM)
    assert found.secret_file is None
    assert "--secret-file" in found.no_secret


def test_a_secret_can_be_required() -> None:
    said = refused(f"--nnodes 2 {MEET} --set security.require_secret=true")
    assert "security.require_secret" in said
    assert "/dev/urandom" in said
    assert nodes("--set security.require_secret=true", SLURM).secret_is_ours
    spec("--set security.require_secret=true")  # a single node makes only its own connections


def test_every_error_is_one_of_ours() -> None:
    for words in ("--nnodes 2 --bind no-such-host.invalid", "--nnodes 2 --rdzv-endpoint ' '"):
        with pytest.raises(FtrunError):
            spec(words)


# --- topology files ---------------------------------------------------------------------------


def test_without_a_file_nothing_is_known() -> None:
    assert read_topology(None) == (None, "")


def test_yaml_is_taken_as_it_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "switches.yaml"
    path.write_text("spine:\n  leaf1: [n1, n2]\n  leaf2: [n3]\n")
    assert read_topology(str(path)) == ({"spine": {"leaf1": ["n1", "n2"], "leaf2": ["n3"]}}, "")


def test_slurms_own_file_is_taken_as_text(tmp_path: Path) -> None:
    path = tmp_path / "topology.conf"
    path.write_text("SwitchName=s0 Nodes=n[1-2]\n")
    assert read_topology(str(path)) == (None, "SwitchName=s0 Nodes=n[1-2]\n")


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "SwitchName=s0 Nodes=n[x]\n", ""])
def test_what_is_neither_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "switches"
    path.write_text(text)
    with pytest.raises(UsageError, match="is not understood"):
        read_topology(str(path))


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_topology(str(tmp_path / "none"))
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot be read"):
        read_topology(str(path))
    path.write_bytes(b"a" * ((8 << 20) + 1))
    with pytest.raises(UsageError, match="more than 8 MiB"):
        read_topology(str(path))


@pytest.mark.parametrize(
    ("address", "pattern", "leaf"),
    [
        ("s0.s2.n7", "switch.switch.node", "s2"),
        ("n7", "node", ""),
        ("", "", ""),
        ("s0.n7", "switch.switch.node", ""),
        ("s0.n7.local", "switch.node", "s0"),
    ],
)
def test_slurm_reports_the_leaf_switch(address: str, pattern: str, leaf: str) -> None:
    reported = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert leaf_switch(reported) == leaf
