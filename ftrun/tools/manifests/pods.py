"""Builds the pod of a node: its container, volumes, rights and memory.

Runs in:  cli. Pure.
Takes in: a `ManifestJob`, and Kubernetes options: image, claim, secret, user.
Gives:    a pod template as a tree for `yaml_text`, for a JobSet and a TrainJob.

Rule 1: A `$` in the user's words is doubled, because Kubernetes expands `$(NAME)` in a command.
"""

import re
from dataclasses import dataclass

from ftrun.cli.launch.nodes import MASTER_PORT
from ftrun.errors import UsageError
from ftrun.tools.manifests.job import ManifestJob, quantity
from ftrun.tools.manifests.volumes import (
    MAX_NAME,
    OWN_SECRET_AT,
    SECRET_AT,
    PodOptions,
    PodVolumes,
)
from ftrun.tools.manifests.yaml_text import Commented, Tree

CONTAINER = "node"
"""Also the name of the replicated job; a TrainJob sets its variables in this container."""

_UNREACHABLE_S = 60
_IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@-]*")
_RESOURCE = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """The pod of one node."""

    volumes: PodVolumes

    def __post_init__(self) -> None:
        place = self.place
        for flag, text, form in (
            ("--image", place.image, _IMAGE),
            ("--gpu-resource", place.gpu_resource, _RESOURCE),
        ):
            if not form.fullmatch(text) or len(text) > MAX_NAME:
                raise UsageError(f"{flag} {text!r} is no name that Kubernetes takes")
        if not 0 <= place.user < 1 << 31:
            raise UsageError(f"--user is a uid, 0 or more, not {place.user}")

    @property
    def job(self) -> ManifestJob:
        return self.volumes.job

    @property
    def place(self) -> PodOptions:
        return self.volumes.place

    @property
    def name(self) -> str:
        return self.volumes.name

    def resources(self) -> dict[str, Tree]:
        machine, job = self.job.machine, self.job
        limits: dict[str, Tree] = {}
        requests: dict[str, Tree] = {}
        needed = job.memory_bytes(self.volumes.shm_bytes)
        if needed is not None:
            limits["memory"] = requests["memory"] = quantity(needed)
        if machine.gpus:
            limits[self.place.gpu_resource] = machine.gpus
        if machine.cpus is not None:
            requests["cpu"] = str(machine.cpus)
        return {"requests": requests, "limits": limits} if limits else {"requests": requests}

    def resources_in_words(self) -> str:
        parts = []
        if self.job.machine.memory is not None:
            memory = self.job.memory_in_words(self.volumes.shm_bytes)
            parts.append(
                f"Memory: {memory}. Without a request the pod is among the first to be evicted."
            )
        else:
            parts.append(
                "--memory was not given: the pod is among the first to be evicted when the "
                "machine's memory runs short."
            )
        if self.job.machine.cpus is not None:
            parts.append("No limit for cpu: the kernel would hold ranks back that are behind.")
        return " ".join(parts)

    def variables(self) -> list[Tree]:
        """All variables except those of the rendezvous."""
        found: list[Tree] = []
        if self.job.nodes > 1:
            path = f"{OWN_SECRET_AT if self.place.user else SECRET_AT}/run"
            found += [
                {"name": "FTRUN_SECRET_FILE", "value": path},
                Commented(
                    "Which nodes fail together: those on one machine. Without it two pods on one "
                    "machine may be all that a snapshot is spread over.",
                    {
                        "name": "FTRUN_FAULT_DOMAIN",
                        "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}},
                    },
                ),
            ]
        if self.place.user:
            found.append(
                Commented(
                    "Without it a user whom the image does not know has / for a home.",
                    {"name": "HOME", "value": "/tmp"},
                )
            )
        if self.job.profile.metrics.port:
            found.append(
                Commented(
                    "Without it the figures are served to the pod itself alone.",
                    {
                        "name": "FTRUN_METRICS_HOST",
                        "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}},
                    },
                )
            )
        return found

    def meeting(self) -> list[Tree]:
        """Rendezvous variables, with the same names as in a TrainJob."""
        if self.job.nodes == 1:
            return []
        host = f"{self.name}-{CONTAINER}-0-0.{self.name}"
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        return [
            Commented(
                "The first pod is where the others ask. It is no more than that: once they have "
                "met, it may be lost like any other.",
                {"name": "PET_MASTER_ADDR", "value": host},
            ),
            {"name": "PET_MASTER_PORT", "value": str(MASTER_PORT)},
            Commented(
                "Ranks are in the order of the pods. Without it: in the order of their names.",
                {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}},
            ),
        ]

    def command(self) -> list[Tree]:
        job = self.job
        words = list(job.flags)
        # PET_ variables of a TrainJob count all pods, and set one rank per GPU or processor. The
        # flags state the intended numbers.
        if job.line.torchrun_value("nnodes") is None:
            words = ["--nnodes", "1", *words]
        if job.line.torchrun_value("nproc-per-node") is None:
            words = ["--nproc-per-node", "1", *words]
        if job.line.own_value("run-id") is None and job.line.torchrun_value("rdzv-id") is None:
            words = ["--run-id", self.name, *words]
        return ["ftrun", *map(_literally, words)]

    def script(self) -> list[Tree]:
        return [_literally(word) for word in self.job.script]

    def template(self, *, containers: list[Tree]) -> dict[str, Tree]:
        spec: dict[str, Tree] = {
            "restartPolicy": Commented(
                "A pod that fails is made anew by the Job, which knows the exit codes below. "
                "OnFailure starts its container again whatever the code was.",
                "Never",
            ),
            "terminationGracePeriodSeconds": Commented(
                "SIGTERM to all pods, or to so many that too few are left, ends the run: at most "
                f"{self.job.grace_s:g} s until ranks are killed, and as long again for the "
                "checkpoint. Without it SIGKILL comes after 30 s, and the checkpoint is not "
                "finished.",
                self.job.ending_s,
            ),
        }
        if self.job.nodes > 1:
            spec |= self._spread()
        if self.place.user:
            spec["securityContext"] = self._rights()
            if self.job.nodes > 1:
                spec["initContainers"] = Commented(
                    "Kubernetes lets a group read a Secret's file, and ftrun takes one that only "
                    "its owner can read.",
                    [self._copy()],
                )
        spec["containers"] = containers
        spec["volumes"] = list(self.volumes.volumes())
        metadata: dict[str, Tree] = {"labels": self.labels()}
        if port := self.job.profile.metrics.port:
            metadata["annotations"] = Commented(
                "Where Prometheus is set up to look for them. Without these nobody asks.",
                {
                    "prometheus.io/scrape": "true",
                    "prometheus.io/port": str(port),
                    "prometheus.io/path": "/metrics",
                },
            )
        return {"metadata": metadata, "spec": spec}

    def container(self, *, start: dict[str, Tree], env: list[Tree]) -> dict[str, Tree]:
        """Builds the container in which ftrun is process 1.

        Args:
            start: image, command and resources, if they are set here.
            env: variables that precede the pod's own.
        """
        ports: list[Tree] = []
        if self.job.nodes > 1:
            ports.append({"name": "meeting", "containerPort": MASTER_PORT})
        if port := self.job.profile.metrics.port:
            ports.append({"name": "metrics", "containerPort": port})
        found: dict[str, Tree] = {"name": CONTAINER, **start}
        found["workingDir"] = Commented(
            "The script's path counts from here, and ftrun-logs is made here.", self.place.workdir
        )
        if variables := [*env, *self.variables()]:
            found["env"] = variables
        if ports:
            found["ports"] = Commented(
                "For readers and tools. A NetworkPolicy must open every TCP port between the "
                "pods: agents, snapshots, gloo and NCCL take free ones."
                if self.job.nodes > 1
                else "For readers and tools.",
                ports,
            )
        if self.place.user:
            found["securityContext"] = dict(_NO_RIGHTS)
        found["volumeMounts"] = list(self.volumes.mounts())
        return found

    def labels(self) -> dict[str, Tree]:
        return {"app.kubernetes.io/name": "ftrun", "app.kubernetes.io/instance": self.name}

    # --- parts --------------------------------------------------------------------------------

    def _spread(self) -> dict[str, Tree]:
        labels: dict[str, Tree] = {"matchLabels": self.labels()}
        return {
            "topologySpreadConstraints": Commented(
                "One pod on each machine, as far as there are machines. Without it a machine's "
                "loss may take several nodes at once.",
                [
                    {
                        "maxSkew": 1,
                        "topologyKey": "kubernetes.io/hostname",
                        "whenUnsatisfiable": "ScheduleAnyway",
                        "labelSelector": labels,
                    }
                ],
            ),
            "tolerations": Commented(
                "How long a pod counts as there whose machine is silent; the cluster's own time "
                "is 300 s. Training does not wait for it where a node stands by.",
                [
                    {
                        "key": f"node.kubernetes.io/{what}",
                        "operator": "Exists",
                        "effect": "NoExecute",
                        "tolerationSeconds": _UNREACHABLE_S,
                    }
                    for what in ("unreachable", "not-ready")
                ],
            ),
        }

    def _rights(self) -> Commented:
        user = self.place.user
        return Commented(
            "Nothing in the pod needs root. fsGroup: else this user may not write to the volumes. "
            "--user 0 leaves all of this out.",
            {
                "runAsNonRoot": True,
                "runAsUser": user,
                "runAsGroup": user,
                "fsGroup": user,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
        )

    def _copy(self) -> dict[str, Tree]:
        return {
            "name": "secret",
            "image": self.place.image,
            "command": ["install", "-m", "600", f"{SECRET_AT}/run", f"{OWN_SECRET_AT}/run"],
            "securityContext": dict(_NO_RIGHTS),
            "resources": {
                "requests": {"cpu": "100m", "memory": "64Mi"},
                "limits": {"memory": "64Mi"},
            },
            "volumeMounts": [
                {"name": "secret", "mountPath": SECRET_AT, "readOnly": True},
                {"name": "own", "mountPath": OWN_SECRET_AT},
            ],
        }


_NO_RIGHTS: dict[str, Tree] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}


def _literally(word: str) -> str:
    return word.replace("$", "$$")
