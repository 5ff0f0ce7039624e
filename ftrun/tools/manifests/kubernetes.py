"""Implements `ftrun render kubernetes`: a JobSet, or a TrainJob and its runtime.

Runs in:  cli. Pure.
Takes in: a `ManifestJob` and a `PodOptions`.
Gives:    YAML for `kubectl apply`. A comment above each part says what happens without it.
Source:   JobSet API v1alpha2 and Kubeflow Trainer v1alpha1 (custom resource definitions of August
          2026). The variables of a TrainJob are those that its torch plugin sets.
"""

import re
from dataclasses import dataclass

from ftrun.errors import ExitCode, UsageError
from ftrun.tools.manifests.job import ManifestJob
from ftrun.tools.manifests.pods import CONTAINER, PodTemplate
from ftrun.tools.manifests.volumes import PodOptions, PodVolumes
from ftrun.tools.manifests.yaml_text import Commented, Tree, to_yaml

LOOPBACK = "127.0.0.1"
KINDS = ("jobset", "trainjob")

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MAX_LABEL = 63
_RANDOM_END = len("-abcde")
_MAX_WORDS = 128
_NO_OTHER_START = (ExitCode.USAGE, ExitCode.STATE_LOST, ExitCode.DO_NOT_RESTART)
_WHY_FLAGS = (
    "--nnodes and --nproc-per-node are said here: PET_NNODES counts the spares too, and a flag "
    "wins over its variable."
)
_BY_SIGNAL = (138, ExitCode.TERMINATED)


@dataclass(frozen=True, slots=True)
class KubernetesOptions:
    """Options of the whole job, not of a pod."""

    kind: str = "jobset"
    namespace: str | None = None
    restarts: int = 20
    """Number of times that all pods may fail before the Job fails."""


def manifest(job: ManifestJob, place: PodOptions, cluster: KubernetesOptions) -> str:
    if cluster.kind not in KINDS:
        raise UsageError(f"--kind is {' or '.join(KINDS)}, not {cluster.kind!r}")
    if not 0 <= cluster.restarts <= 10_000:
        raise UsageError(f"--restarts is 0 to 10000, not {cluster.restarts}")
    pod = PodTemplate(PodVolumes(job, place, _name(job, cluster)))
    documents = _jobset(pod, cluster) if cluster.kind == "jobset" else _trainjob(pod, cluster)
    return to_yaml(documents, head=_head(pod, cluster))


def _name(job: ManifestJob, cluster: KubernetesOptions) -> str:
    """Returns the name of the JobSet; Kubernetes derives the names of pods from it."""
    stem = re.sub(r"[^a-z0-9-]+", "-", job.stem.lower()).strip("-0123456789")
    room = _MAX_LABEL - len(f"-{CONTAINER}-0-{job.nodes - 1}") - _RANDOM_END
    name = job.name if job.name is not None else stem[:room].rstrip("-") or "ftrun"
    for what, text, most in (
        ("--name", name, room),
        *([("--namespace", cluster.namespace, _MAX_LABEL)] if cluster.namespace else []),
    ):
        if not _LABEL.fullmatch(text) or len(text) > most:
            raise UsageError(
                f"{what} {text!r} is not usable: 1 to {most} of a-z, 0-9 and -, the first a "
                "letter, the last no hyphen"
            )
    return name


def _head(pod: PodTemplate, cluster: KubernetesOptions) -> str:
    kind = {"jobset": "a JobSet", "trainjob": "a TrainJob and its runtime"}[cluster.kind]
    where = f" -n {cluster.namespace}" if cluster.namespace else ""
    lines = [
        f"Written by ftrun render kubernetes: {kind}; {pod.job.in_words}.",
        "Above each part stands what happens without it. Once, before it is applied:",
    ]
    secret = pod.volumes.secret
    if pod.job.nodes > 1:
        lines += [
            "  (umask 077 && head -c 32 /dev/urandom > run.secret)",
            f"  kubectl{where} create secret generic {secret} --from-file=run=run.secret",
            "Then:",
        ]
    else:
        lines[-1] = "Above each part stands what happens without it."
    lines += [f"  kubectl{where} apply -f FILE"]
    lines += [f"  kubectl{where} exec {pod.name}-{CONTAINER}-0-0-xxxxx -- ftrun status"]
    return "\n".join(lines)


# --- a JobSet ---------------------------------------------------------------------------------


def _jobset(pod: PodTemplate, cluster: KubernetesOptions) -> list[dict[str, Tree]]:
    start: dict[str, Tree] = {
        "image": pod.place.image,
        "command": pod.command(),
        "args": pod.script(),
        "resources": Commented(pod.resources_in_words(), pod.resources()),
    }
    container = pod.container(start=start, env=pod.meeting())
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _metadata(pod, cluster),
            "spec": _jobset_spec(pod, cluster, container, network=True),
        }
    ]


def _jobset_spec(
    pod: PodTemplate, cluster: KubernetesOptions, container: dict[str, Tree], *, network: bool
) -> dict[str, Tree]:
    found: dict[str, Tree] = {}
    if network and pod.job.nodes > 1:
        found["network"] = Commented(
            "A headless Service of this name, so that pods have names that stay. Without "
            "publishNotReadyAddresses a pod has none before it is ready, and it is not before "
            "the others are found.",
            {
                "enableDNSHostnames": True,
                "subdomain": pod.name,
                "publishNotReadyAddresses": True,
            },
        )
    found["failurePolicy"] = Commented(
        "The outer net: a Job that has used up its pods is made anew, all of it, and goes on from "
        "the checkpoint; one whose time is over or whose exit code says that another start does "
        "not help is not.",
        {
            "maxRestarts": 3,
            "rules": [
                {
                    "name": "noOtherStart",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"],
                }
            ],
        },
    )
    template: dict[str, Tree] = {"spec": _job_spec(pod, cluster, container)}
    if not network:
        template = {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            **template,
        }
    found["replicatedJobs"] = [{"name": CONTAINER, "replicas": 1, "template": template}]
    return found


def _job_spec(
    pod: PodTemplate, cluster: KubernetesOptions, container: dict[str, Tree]
) -> dict[str, Tree]:
    job = pod.job
    found: dict[str, Tree] = {
        "completionMode": Commented(
            "Each pod has a number and a name that stay: one that is made anew joins again as the "
            "same node.",
            "Indexed",
        ),
        "completions": Commented(f"All nodes: {job.in_words}.", job.nodes),
        "parallelism": job.nodes,
        "backoffLimit": Commented(
            f"So many pods may fail: all {job.nodes}, {cluster.restarts} times. Without it 6, "
            "and a few lost machines are the end of the run.",
            cluster.restarts * job.nodes,
        ),
        "podReplacementPolicy": Commented(
            "A pod is made anew once the one before it is really gone: two of one number would be "
            "two nodes of one name. Of a machine that is off that is known when its Node object "
            "is deleted, or has the taint node.kubernetes.io/out-of-service.",
            "Failed",
        ),
        "podFailurePolicy": {"rules": _rules()},
    }
    if job.time_s is not None:
        found["activeDeadlineSeconds"] = Commented(
            "As --time says: then the pods get SIGTERM, write a checkpoint, and that is all.",
            job.time_s,
        )
    found["template"] = pod.template(containers=[container])
    return found


def _rules() -> list[Tree]:
    return [
        Commented(
            "Wrong usage, a state that is lost, the same failure again and again: another start "
            "does not help. Without this rule it is tried until the pods are used up.",
            {
                "action": "FailJob",
                "onExitCodes": {
                    "containerName": CONTAINER,
                    "operator": "In",
                    "values": [int(code) for code in _NO_OTHER_START],
                },
            },
        ),
        Commented(
            "Drained, preempted, evicted: not the pod's fault, and not counted.",
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
        ),
        Commented(
            "Stopped by a signal: a drained pod, or the whole run where too few would be left. "
            "Pods are made anew. To stop it for good, delete it.",
            {
                "action": "Ignore",
                "onExitCodes": {
                    "containerName": CONTAINER,
                    "operator": "In",
                    "values": [int(code) for code in _BY_SIGNAL],
                },
            },
        ),
    ]


def _metadata(pod: PodTemplate, cluster: KubernetesOptions) -> dict[str, Tree]:
    found: dict[str, Tree] = {"name": pod.name}
    if cluster.namespace is not None:
        found["namespace"] = cluster.namespace
    found["labels"] = pod.labels()
    return found


# --- a TrainJob -------------------------------------------------------------------------------


def _trainjob(pod: PodTemplate, cluster: KubernetesOptions) -> list[dict[str, Tree]]:
    job = pod.job
    for what, words in (("flags", pod.command()), ("words of the script", pod.script())):
        if len(words) > _MAX_WORDS:
            raise UsageError(
                f"a TrainJob takes {_MAX_WORDS} words at most, and these are {len(words)} {what}. "
                "Put flags into a profile, or render --kind jobset"
            )
    command, why = pod.command(), _WHY_FLAGS
    if job.nodes == 1:
        command[1:1] = ["--master-addr", LOOPBACK]
        why += " --master-addr: the pod's own name may not be known yet when it starts."
    container = pod.container(start={"image": pod.place.image}, env=[])
    runtime: dict[str, Tree] = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(pod, cluster),
        "spec": {
            "mlPolicy": Commented(
                "torch: gives the pods PET_MASTER_ADDR (the first pod), PET_MASTER_PORT and "
                "PET_NODE_RANK, with which they find each other.",
                {"numNodes": job.nodes, "torch": {}},
            ),
            "template": {"spec": _jobset_spec(pod, cluster, container, network=False)},
        },
    }
    trainer: dict[str, Tree] = {
        "numNodes": Commented("All pods, those that stand by too.", job.nodes),
        "image": pod.place.image,
        "command": Commented(why, command),
        "args": pod.script(),
        "resourcesPerNode": Commented(pod.resources_in_words(), pod.resources()),
    }
    text = job.line.torchrun_value("nproc-per-node") or "1"
    if text.isdecimal():
        trainer["numProcPerNode"] = int(text)
    trains: dict[str, Tree] = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(pod, cluster),
        "spec": {
            "runtimeRef": Commented(
                "The runtime above. Without it: one of the cluster's, which has neither /dev/shm "
                "nor rules for exit codes.",
                {
                    "apiGroup": "trainer.kubeflow.org",
                    "kind": "TrainingRuntime",
                    "name": pod.name,
                },
            ),
            "trainer": trainer,
        },
    }
    return [runtime, trains]
