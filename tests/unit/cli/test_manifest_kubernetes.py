"""A manifest has its kind, field by field, and a pod gets the typed arguments."""

import itertools
import re
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from manifest_schema import problems

from ftrun.errors import UsageError
from ftrun.tools.manifests.job import JobOptions, MachineSpec, job_of
from ftrun.tools.manifests.kubernetes import KubernetesOptions, manifest
from ftrun.tools.manifests.yaml_text import WIDTH

LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
FOUR = "--nnodes 4 --spares 1 --nproc-per-node 8 --checkpoint-dir /shared/run1 train.py --lr 1e-4"


def documents(
    words: str | list[str],
    *,
    machine: MachineSpec | None = None,
    name: str | None = None,
    time: str | None = None,
    **place: Any,
) -> list[dict[str, Any]]:
    typed = words.split() if isinstance(words, str) else words
    job = job_of(typed, machine or MachineSpec(), JobOptions(name, time))
    if job.shared_directory:
        place.setdefault("claim", "shared")
    kind = place.pop("kind", "jobset")
    where = KubernetesOptions(image=place.pop("image", "registry.example/train:1"), **place)
    return list(yaml.safe_load_all(manifest(job, where, kind)))


def job_of_pods(document: dict[str, Any]) -> dict[str, Any]:
    spec = document["spec"]
    jobset = spec["template"]["spec"] if "TrainingRuntime" in document["kind"] else spec
    (replicated,) = jobset["replicatedJobs"]
    found: dict[str, Any] = replicated["template"]["spec"]
    return found


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job_of_pods(document)["template"]["spec"]
    return found


def node_of(document: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod_of(document)["containers"]
    assert isinstance(found, dict)
    return found


def expanded(word: str, variables: dict[str, str] | None = None) -> str:
    """As Kubernetes expands an argument of a command: $$ is $, $(NAME) an existing variable."""

    def one(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return (variables or {}).get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", one, word)


EVERYTHING = [
    (kind, nodes, user, machine)
    for kind, nodes, user, machine in itertools.product(
        ("jobset", "trainjob", "runtime"),
        ("--nnodes 1", "--nnodes 4 --spares 1", "--nnodes 2:4"),
        (0, 1000),
        (
            MachineSpec(),
            MachineSpec(8, 8, "1Gi", "1Gi"),
            MachineSpec(gpus=1),
            MachineSpec(memory="2G"),
        ),
    )
]


@pytest.mark.parametrize(("kind", "nodes", "user", "machine"), EVERYTHING)
def test_every_manifest_is_of_its_kind(
    kind: str, nodes: str, user: int, machine: MachineSpec
) -> None:
    own = "$(TRAINJOB_NAME)" if kind == "runtime" else "x"
    for more in ("train.py", f"--checkpoint-dir /shared/{own} --metrics-port 9400 train.py -- $x"):
        found = documents(f"{nodes} {more}", kind=kind, user=user, machine=machine, time="1h",
                          restart_in_place=bool(user))  # fmt: skip
        assert [problems(one) for one in found] == [[] for _ in found]
        for one in found:
            check_names(one)


def check_names(document: dict[str, Any]) -> None:
    """Each name has the form of its kind; mounts and volumes refer to each other."""
    assert LABEL.fullmatch(document["metadata"]["name"])
    if document["kind"] == "TrainJob":
        return
    pod = pod_of(document)
    names = [one["name"] for one in pod["volumes"]]
    assert len(set(names)) == len(names)
    mounted = set()
    for one in (*pod["containers"], *pod.get("initContainers", [])):
        assert LABEL.fullmatch(one["name"])
        paths = [mount["mountPath"] for mount in one["volumeMounts"]]
        assert len(set(paths)) == len(paths)
        mounted |= {mount["name"] for mount in one["volumeMounts"]}
        variables = [entry["name"] for entry in one.get("env", [])]
        assert len(set(variables)) == len(variables)
        for port in one.get("ports", []):
            assert LABEL.fullmatch(port["name"])
            assert len(port["name"]) <= 15
    assert mounted == set(names)
    pods_name = f"{document['metadata']['name']}-node-0-{job_of_pods(document)['completions']}"
    assert len(f"{pods_name}-abcde") <= 63


def test_the_schema_finds_what_is_wrong() -> None:
    (good,) = documents(FOUR)
    assert problems({**good, "kind": "Jobset"})
    for path, value in (
        ("backoffLimit", "20"),
        ("parallelism", True),
        ("podReplacement", "Failed"),
        ("podFailurePolicy", {"rules": [{"onPodConditions": []}]}),
    ):
        (one,) = documents(FOUR)
        job_of_pods(one)[path] = value
        assert problems(one), path
    (one,) = documents(FOUR)
    node_of(one)["resources"] = {"limits": {"memory": "12 GB"}}
    assert problems(one)


def test_a_jobset_of_four_nodes_and_a_spare() -> None:
    (jobset,) = documents(FOUR, namespace="ml", machine=MachineSpec(16, 8, "100Gi", "1Gi"))
    assert jobset["metadata"]["namespace"] == "ml"
    assert jobset["spec"]["network"] == {
        "enableDNSHostnames": True,
        "subdomain": "train",
        "publishNotReadyAddresses": True,
    }
    job = job_of_pods(jobset)
    assert (job["completions"], job["parallelism"], job["backoffLimit"]) == (5, 5, 100)
    assert job["podReplacementPolicy"] == "Failed"  # the only value that a podFailurePolicy allows
    pod = pod_of(jobset)
    assert pod["restartPolicy"] == "Never"  # likewise
    assert pod["terminationGracePeriodSeconds"] == 2 * 43 + 10  # 8 Gi at 200 MB/s
    assert pod["securityContext"]["runAsNonRoot"] is True
    node = node_of(jobset)
    assert node["command"] == [
        *("ftrun", "--run-id", "train", "--grace", "43"),
        *("--nnodes", "4", "--spares", "1", "--nproc-per-node", "8"),
        *("--checkpoint-dir", "/shared/run1"),
    ]
    assert node["args"] == ["train.py", "--lr", "1e-4"]
    variables = {entry["name"]: entry.get("value") for entry in node["env"]}
    assert variables["PET_MASTER_ADDR"] == "train-node-0-0.train"
    assert variables["PET_MASTER_PORT"] == "29500"
    assert node["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert node["resources"]["limits"]["memory"] == node["resources"]["requests"]["memory"]


def test_codes_that_no_other_start_mends_end_it() -> None:
    (jobset,) = documents(FOUR)
    rules = job_of_pods(jobset)["podFailurePolicy"]["rules"]
    by_code = {c: r["action"] for r in rules for c in r.get("onExitCodes", {}).get("values", [])}
    assert by_code == {77: "FailJob", 93: "FailJob", 138: "Ignore", 143: "Ignore"}
    (outer,) = jobset["spec"]["failurePolicy"]["rules"]
    assert outer["action"] == "FailJobSet"
    assert "PodFailurePolicy" in outer["onJobFailureReasons"]


def test_a_trainjob_reports_what_its_variables_would_report_otherwise() -> None:
    runtime, job = documents("--spares 1 --nnodes 4 train.py", kind="trainjob")
    assert job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "TrainingRuntime",
        "name": runtime["metadata"]["name"],
    }
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (5, 1)
    assert "--nproc-per-node" in trainer["command"]
    assert node_of(runtime)["name"] == "node"
    reserved = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR"}
    assert not reserved & {entry["name"] for entry in node_of(runtime)["env"]}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = replicated["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    _, alone = documents("train.py", kind="trainjob")
    command = alone["spec"]["trainer"]["command"]
    assert command[command.index("--nnodes") + 1] == "1"
    assert command[command.index("--master-addr") + 1] == "127.0.0.1"


def typed(words: str, **place: Any) -> list[dict[str, Any]]:
    """The documents of `ftrun manifest kubeflow`."""
    job = job_of(words.split(), MachineSpec(), JobOptions(), needs_script=False)
    text = manifest(job, KubernetesOptions("registry.example/train:1", **place), "runtime")
    return list(yaml.safe_load_all(text))


def test_a_runtime_serves_any_trainjob() -> None:
    """Its name, nodes, ranks and script are the TrainJob's: nothing is fixed for all of them."""
    words = "--checkpoint-dir /shared/$(TRAINJOB_NAME) --fault-domain $x"
    (runtime,) = typed(words, claim="shared", namespace="ml")
    assert (runtime["kind"], runtime["metadata"]["name"]) == ("ClusterTrainingRuntime", "ftrun")
    assert "namespace" not in runtime["metadata"]
    assert runtime["metadata"]["labels"]["trainer.kubeflow.org/framework"] == "torch"
    assert problems(runtime) == []
    node = node_of(runtime)
    assert "args" not in node
    variables = {"TRAINJOB_NAME": "first"}
    assert [expanded(word, variables) for word in node["command"]] == [
        *(
            "ftrun",
            "--run-id",
            "first",
            "--checkpoint-dir",
            "/shared/first",
            "--fault-domain",
            "$x",
        ),
    ]
    assert {"name": "shared", "mountPath": "/shared"} in node["volumeMounts"]
    (name,) = [entry for entry in node["env"] if entry["name"] == "TRAINJOB_NAME"]
    assert "jobset-name" in name["valueFrom"]["fieldRef"]["fieldPath"]
    assert "secret" in {volume["name"] for volume in pod_of(runtime)["volumes"]}
    assert "network" not in runtime["spec"]["template"]["spec"]  # the name of each JobSet
    assert job_of_pods(runtime)["backoffLimit"] == 2000


def test_a_runtime_with_fixed_nodes_and_a_script_has_a_trainjob() -> None:
    runtime, job = typed("--nnodes 4 --spares 1 --nproc-per-node 8 train.py --lr 1")
    assert runtime["spec"]["mlPolicy"]["numNodes"] == 5
    assert job_of_pods(runtime)["backoffLimit"] == 100
    assert job["spec"]["runtimeRef"]["kind"] == "ClusterTrainingRuntime"
    assert job["spec"]["trainer"] == {
        "numNodes": 5, "numProcPerNode": 8, "args": ["train.py", "--lr", "1"],
    }  # fmt: skip
    alone, _ = typed("--nnodes 1 train.py")
    assert "127.0.0.1" in node_of(alone)["command"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--spares 1", "--spares needs --nnodes in a runtime"),
        ("--run-id r", "--run-id is the name of each TrainJob"),
        ("--rdzv-id r", "--run-id is the name of each TrainJob"),
        ("--checkpoint-dir /shared", "Write --checkpoint-dir '/shared/$(TRAINJOB_NAME)'"),
        ("--checkpoint-dir s3://b/x", "would be the same for all TrainJobs"),
    ],
)
def test_a_runtime_refuses_what_is_of_one_run(words: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        typed(words)
    assert said in str(caught.value)


def test_a_killed_container_starts_again_in_its_pod_if_wanted() -> None:
    """Only after SIGKILL: the script's own codes would restart it without a limit."""
    (jobset,) = documents(FOUR, restart_in_place=True)
    node = node_of(jobset)
    assert node["restartPolicy"] == pod_of(jobset)["restartPolicy"] == "Never"
    assert node["restartPolicyRules"] == [
        {"action": "Restart", "exitCodes": {"operator": "In", "values": [137]}}
    ]
    (plain,) = documents(FOUR)
    assert "restartPolicyRules" not in node_of(plain)


def test_one_pod_needs_no_secret_and_no_place_to_meet() -> None:
    (jobset,) = documents("--nproc-per-node 2 train.py")
    text = yaml.safe_dump(jobset)
    assert "PET_" not in text
    assert "secret" not in text
    assert "topologySpread" not in text


@pytest.mark.parametrize("user", [0, 1000])
def test_a_secret_is_in_a_file_that_only_its_owner_reads(user: int) -> None:
    (jobset,) = documents(FOUR, user=user)
    pod, node = pod_of(jobset), node_of(jobset)
    (path,) = [e["value"] for e in node["env"] if e["name"] == "FTRUN_SECRET_FILE"]
    mounts = {mount["mountPath"]: mount["name"] for mount in node["volumeMounts"]}
    volume = next(v for v in pod["volumes"] if v["name"] == mounts[path.rpartition("/")[0]])
    if user == 0:
        assert volume["secret"] == {"secretName": "train-secret", "defaultMode": 0o400}
        assert "securityContext" not in pod
        return
    (copies,) = pod["initContainers"]
    assert copies["command"][:3] == ["install", "-m", "600"]
    assert copies["command"][-1] == path
    assert volume["emptyDir"]["medium"] == "Memory"


def test_shm_is_reckoned_from_what_needs_it() -> None:
    def shm(**place: Any) -> str:
        (jobset,) = documents("--nproc-per-node 4 train.py", **place)
        (found,) = [v["emptyDir"] for v in pod_of(jobset)["volumes"] if v["name"] == "shm"]
        assert found["medium"] == "Memory"
        size = found["sizeLimit"]
        assert isinstance(size, str)
        return size

    assert shm(loader_workers=0) == "1Gi"
    assert shm(loader_workers=3, batch="32Mi") == "2Gi"  # 4 ranks, 2 x 3 + 2 batches
    assert shm(shm="3G") == "2862Mi"


def test_checkpoints_at_a_url_need_no_volume() -> None:
    (document,) = documents("--checkpoint-dir s3://bucket/run1 train.py", kind="jobset")
    assert "s3://bucket/run1" in node_of(document)["command"]
    assert not [one for one in pod_of(document)["volumes"] if one["name"] == "shared"]


def test_prometheus_finds_the_figures() -> None:
    (jobset,) = documents("--metrics-port 9400 train.py")
    annotations = job_of_pods(jobset)["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == "9400"
    node = node_of(jobset)
    assert {"name": "metrics", "containerPort": 9400} in node["ports"]
    (entry,) = [e for e in node["env"] if e["name"] == "FTRUN_METRICS_HOST"]
    assert entry["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    (without,) = documents("train.py")
    assert "annotations" not in job_of_pods(without)["template"]["metadata"]


_words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)


@settings(max_examples=30)
@given(st.lists(_words | st.sampled_from(["$(HOME)", "$$", "$", "1e-4", "yes", "08"]), max_size=8))
def test_the_scripts_words_are_given_as_they_were_typed(words: list[str]) -> None:
    (jobset,) = documents(["train.py", *words])
    args = node_of(jobset)["args"]
    assert all(isinstance(word, str) for word in args)
    assert [expanded(word, {"HOME": "elsewhere"}) for word in args] == ["train.py", *words]


def test_lines_are_no_longer_than_a_screen() -> None:
    job = job_of(FOUR.split(), MachineSpec(8, 8, "1Gi", "1Gi"), JobOptions())
    for kind in ("jobset", "trainjob"):
        place = KubernetesOptions("i", claim="shared", restart_in_place=True)
        text = manifest(job, place, kind)
        assert max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.parametrize(
    ("words", "options", "said"),
    [
        ("train.py", {"kind": "pod"}, "--kind is jobset or trainjob, not 'pod'"),
        ("train.py", {"name": "Big"}, "--name 'Big' is not usable: 1 to 48 of a-z, 0-9 and -"),
        ("train.py", {"name": "a" * 49}, "is not usable"),
        ("--nnodes 1000 train.py", {"name": "a" * 47}, "1 to 46 of a-z"),
        ("train.py", {"namespace": "a.b"}, "--namespace 'a.b' is not usable"),
        ("train.py", {"restarts": -1}, "--restarts is 0 to 10000"),
        ("train.py", {"image": "a b"}, "--image 'a b' is no name"),
        ("train.py", {"secret": "A"}, "--secret 'A' is no name"),
        ("train.py", {"claim": "A:/x"}, "--claim 'A' is no name"),
        ("train.py", {"claim": "a:x"}, "--claim is an absolute path"),
        ("train.py", {"gpu_resource": "gpu"}, "--gpu-resource 'gpu' is no name"),
        ("train.py", {"user": -1}, "--user is a uid"),
        ("train.py", {"workdir": "here"}, "--workdir is an absolute path"),
        ("train.py", {"workdir": "/a/../b"}, "--workdir is an absolute path"),
        ("train.py", {"loader_workers": -1}, "--loader-workers is 0 to 1000"),
        ("train.py", {"shm": "lots"}, "--shm is a size"),
        ("train.py", {"batch": "0"}, "--batch is a size"),
        (
            "--checkpoint-dir /x train.py",
            {"claim": None},
            "would be in the pod, and be deleted with it",
        ),
        ("--checkpoint-dir x train.py", {}, "--checkpoint-dir is an absolute path"),
        ("--checkpoint-dir /x train.py", {"claim": "a:/y"}, "is not on the volume"),
        ("train.py " + "x " * 128, {"kind": "trainjob"}, "takes at most 128 words"),
    ],
)
def test_what_kubernetes_would_not_take_is_reported(
    words: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        documents(words, **options)
    assert said in str(caught.value)


def test_a_name_comes_from_the_script() -> None:
    for script, name in (
        ("My_Train.py", "my-train"),
        ("9lives.py", "lives"),
        ("?.py", "ftrun"),
        (f"{'long' * 20}.py", ("long" * 20)[:48]),
    ):
        (jobset,) = documents([script])
        assert jobset["metadata"]["name"] == name
