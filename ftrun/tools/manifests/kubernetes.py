"""Renders `ftrun manifest kubernetes` and `kubeflow`: a JobSet, a TrainJob, a cluster's runtime.

Source: JobSet API v1alpha2 and Kubeflow Trainer v1alpha1 (custom resource definitions of August
2026); the variables of a TrainJob are those that its torch plugin sets. NCCL's user guide requires
1 GiB of /dev/shm (Troubleshooting, Shared memory). torch's default `prefetch_factor` keeps two
batches ready per loader worker. Restarts of a container: KEP-5307 (Kubernetes 1.35). JobSet's
restart strategy InPlaceRestart (KEP-467) is not used: it restarts all pods after the failure of
one, which would end the SMPs of healthy nodes.

Rule 1: A `$` in the user's words is doubled, because Kubernetes expands `$(NAME)` in a command. In
        a runtime `$(TRAINJOB_NAME)` stays: it is a variable of each of its TrainJobs.
"""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any

from ftrun.cli.completion import option
from ftrun.cli.screen.text import count, size_of
from ftrun.errors import ExitCode, UsageError
from ftrun.tools.manifests.job import GIB, MIB, ManifestJob, quantity
from ftrun.tools.manifests.yaml_text import rendered

KINDS = ("jobset", "trainjob")
RUNTIME = "runtime"
"""A ClusterTrainingRuntime, and a TrainJob that uses it if there is a script."""
OF_TRAINJOB = "$(TRAINJOB_NAME)"

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@-]*")
_RESOURCE = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?")
_MAX_LABEL, _MAX_NAME = 63, 253
_RANDOM_END = len("-abcde")
_MAX_WORDS = 128
_NCCL_BYTES = GIB
_PREFETCH = 2
_HELD_BATCHES = 2
_EXIT_CODES = {
    # Not 2: a pod that replaces another one may fail by its node, and must not end the others.
    "final": [int(c) for c in (ExitCode.STATE_LOST, ExitCode.DO_NOT_RESTART)],
    "by_signal": [138, int(ExitCode.TERMINATED)],
    "killed": [137],
}
_ASSUMED_NODES = 100
"""For the limit of failed pods of a runtime whose TrainJobs set the number of nodes."""


@dataclass(frozen=True, slots=True)
class KubernetesOptions:
    """Options of a pod and of the whole job."""

    image: Annotated[str, option("--image", "has ftrun, torch and the script")]
    gpu_resource: Annotated[
        str,
        option("--gpu-resource", "the cluster's name of a GPU"),
    ] = "nvidia.com/gpu"
    shm: Annotated[str | None, option("--shm", "of /dev/shm (default: computed)", "SIZE")] = None
    loader_workers: Annotated[
        int, option("--loader-workers", "of each rank, for /dev/shm", "N")
    ] = 4
    batch: Annotated[str, option("--batch", "of one batch, for /dev/shm", "SIZE")] = "16Mi"
    claim: Annotated[
        str | None, option("--claim", "of the volume for checkpoints", "NAME[:PATH]")
    ] = None
    secret: Annotated[
        str | None, option("--secret", "name of the Secret (default: NAME-secret)")
    ] = None
    user: Annotated[int, option("--user", "of the pods; 0: the image's own", "UID")] = 1000
    workdir: Annotated[str, option("--workdir", "where ftrun is started", "DIR")] = "/workspace"
    namespace: Annotated[str | None, option("--namespace", "not given: none")] = None
    restarts: Annotated[int, option("--restarts", "times that all pods may fail", "N")] = 20
    restart_in_place: Annotated[
        bool, option("--restart-in-place", "a killed container in its pod; Kubernetes 1.35")
    ] = False


def manifest(job: ManifestJob, place: KubernetesOptions, kind: str = "jobset") -> str:
    """Returns YAML for `kubectl apply`; a comment above each part says what happens without it."""
    if kind not in (*KINDS, RUNTIME):
        raise UsageError(f"--kind is {' or '.join(KINDS)}, not {kind!r}")
    is_runtime = kind == RUNTIME
    is_open = is_runtime and job.line.torchrun_value("nnodes") is None
    if is_runtime:
        _check_runtime(job, is_open=is_open)
    if not 0 <= place.restarts <= 10_000:
        raise UsageError(f"--restarts is 0 to 10000, not {place.restarts}")
    name = _name(job, place)
    secret = place.secret or f"{name}-secret"
    mount: str | None = None
    if place.claim is not None:
        directory = (job.shared_directory or "/shared").partition(f"/{OF_TRAINJOB}")[0]
        mount = place.claim.partition(":")[2] or directory
    _check_pod(place, secret)
    _check_paths(job, place, mount)
    shm_bytes = _shm_bytes(job, place)
    command = _runtime_command(job) if is_runtime else _command(job, name)
    script = [_literally(word) for word in job.script]
    text = job.line.torchrun_value("nproc-per-node") or "1"
    if kind != "jobset":
        _check_words(command, script)
        if job.nodes == 1 and not is_open:
            command[1:1] = ["--master-addr", "127.0.0.1"]
    lines = rendered(
        "kubernetes.yaml",
        job=job,
        place=place,
        kind=kind,
        is_open=is_open,
        counted_nodes=_ASSUMED_NODES if is_open else job.nodes,
        name=name,
        secret=secret,
        mount=mount,
        logs=f"{place.workdir.rstrip('/')}/ftrun-logs",
        shm={"size": quantity(shm_bytes), "reason": _shm_reason(job, place)},
        resources=_resources(job, place, shm_bytes),
        command=command,
        script=script,
        ranks=int(text) if text.isdecimal() else None,
        exit_codes=_EXIT_CODES,
    )
    return "".join(f"{line}\n" for line in lines if line)


def _name(job: ManifestJob, place: KubernetesOptions) -> str:
    """Returns the name of the JobSet; Kubernetes derives the names of pods from it."""
    stem = re.sub(r"[^a-z0-9-]+", "-", job.stem.lower()).strip("-0123456789")
    room = _MAX_LABEL - len(f"-node-0-{job.nodes - 1}") - _RANDOM_END
    name = job.name if job.name is not None else stem[:room].rstrip("-") or "ftrun"
    for what, text, most in (
        ("--name", name, room),
        *([("--namespace", place.namespace, _MAX_LABEL)] if place.namespace else []),
    ):
        if not _LABEL.fullmatch(text) or len(text) > most:
            raise UsageError(
                f"{what} {text!r} is not usable: 1 to {most} of a-z, 0-9 and -, the first a "
                "letter, the last no hyphen"
            )
    return name


def _check_runtime(job: ManifestJob, *, is_open: bool) -> None:
    """Refuses what cannot hold for every TrainJob of a runtime."""
    if is_open and job.spares:
        raise UsageError(
            "--spares needs --nnodes in a runtime, because the number of nodes of a TrainJob "
            f"includes the spares: --nnodes N --spares {job.spares}"
        )
    if job.has_run_id:
        raise UsageError(
            "--run-id is the name of each TrainJob, so a runtime has none: leave it out"
        )
    directory = job.checkpoint_directory
    if directory is not None and OF_TRAINJOB not in directory:
        raise UsageError(
            f"--checkpoint-dir {directory} would be the same for all TrainJobs of the runtime. "
            f"Write --checkpoint-dir '{directory}/{OF_TRAINJOB}'"
        )


def _check_pod(place: KubernetesOptions, secret: str) -> None:
    claim = [("--claim", place.claim.partition(":")[0], _NAME)] if place.claim is not None else []
    for flag, text, form in (
        ("--secret", secret, _NAME),
        ("--image", place.image, _IMAGE),
        ("--gpu-resource", place.gpu_resource, _RESOURCE),
        *claim,
    ):
        if not form.fullmatch(text) or len(text) > _MAX_NAME:
            raise UsageError(f"{flag} {text!r} is no name that Kubernetes accepts")
    if not 0 <= place.user < 1 << 31:
        raise UsageError(f"--user is a uid, 0 or more, not {place.user}")
    if not 0 <= place.loader_workers <= 1000:
        raise UsageError(f"--loader-workers is 0 to 1000, not {place.loader_workers}")


def _check_words(command: list[str], script: list[str]) -> None:
    for what, words in (("flags", command), ("words of the script", script)):
        if len(words) > _MAX_WORDS:
            raise UsageError(
                f"a TrainJob takes at most {_MAX_WORDS} words, and there are {len(words)} {what}. "
                "Put flags into a profile, or render --kind jobset"
            )


def _check_paths(job: ManifestJob, place: KubernetesOptions, mount: str | None) -> None:
    directory = job.shared_directory
    paths = (("--workdir", place.workdir), ("--checkpoint-dir", directory), ("--claim", mount))
    for flag, path in paths:
        if path and (not path.startswith("/") or ".." in PurePosixPath(path).parts or ":" in path):
            raise UsageError(
                f"{flag} is an absolute path in the pod, such as /shared/run1, not {path!r}"
            )
    if directory is None:
        return
    if mount is None:
        raise UsageError(
            f"--checkpoint-dir {directory} would be in the pod, and be deleted with it. Name the "
            "claim of a volume that all pods can write: --claim NAME, or NAME:PATH to mount it "
            "there"
        )
    if not PurePosixPath(directory).is_relative_to(mount):
        raise UsageError(
            f"--checkpoint-dir {directory} is not on the volume that --claim mounts at {mount}. "
            "Name a directory below it"
        )


def _shm_bytes(job: ManifestJob, place: KubernetesOptions) -> int:
    if place.shm is not None:
        return size_of(place.shm, "--shm")
    in_flight = _PREFETCH * place.loader_workers + _HELD_BATCHES
    batches = job.ranks * in_flight if place.loader_workers else 0
    return -(-(_NCCL_BYTES + batches * size_of(place.batch, "--batch")) // MIB) * MIB


def _shm_reason(job: ManifestJob, place: KubernetesOptions) -> str:
    if place.shm is not None:
        return "As --shm says."
    found = f"{quantity(_NCCL_BYTES)} for NCCL, as its guide requires"
    if place.loader_workers:
        found += (
            f", and for {count(job.ranks, 'rank')} with {place.loader_workers} loader workers each "
            f"{_PREFETCH} batches of {place.batch.strip()} for every worker and {_HELD_BATCHES} in "
            "use"
        )
    return f"{found}."


def _resources(job: ManifestJob, place: KubernetesOptions, shm_bytes: int) -> dict[str, Any]:
    machine = job.machine
    requests: dict[str, str] = {}
    limits: dict[str, str | int] = {}
    needed = job.memory_bytes(shm_bytes)
    if needed is not None:
        limits["memory"] = requests["memory"] = quantity(needed)
        reason = (
            f"Memory: {job.memory_text(shm_bytes)}. Without a request the pod is among the "
            "first to be evicted."
        )
    else:
        reason = (
            "--memory was not given: the pod is among the first to be evicted when the memory of "
            "the machine is short."
        )
    if machine.gpus:
        limits[place.gpu_resource] = machine.gpus
    if machine.cpus is not None:
        requests["cpu"] = str(machine.cpus)
        reason += " No limit for cpu, because the kernel would throttle ranks that are behind."
    return {"requests": requests, "limits": limits, "reason": reason}


def _command(job: ManifestJob, name: str) -> list[str]:
    words = list(job.flags)
    # PET_ variables of a TrainJob count all pods, and set one rank per GPU or processor. The
    # flags state the intended numbers.
    if job.line.torchrun_value("nnodes") is None:
        words = ["--nnodes", "1", *words]
    if job.line.torchrun_value("nproc-per-node") is None:
        words = ["--nproc-per-node", "1", *words]
    if not job.has_run_id:
        words = ["--run-id", name, *words]
    return ["ftrun", *map(_literally, words)]


def _runtime_command(job: ManifestJob) -> list[str]:
    """Without --nnodes and --nproc-per-node the TrainJob sets them, by PET_ variables."""
    words = [_literally(word).replace(f"${OF_TRAINJOB}", OF_TRAINJOB) for word in job.flags]
    return ["ftrun", "--run-id", OF_TRAINJOB, *words]


def _literally(word: str) -> str:
    return word.replace("$", "$$")
