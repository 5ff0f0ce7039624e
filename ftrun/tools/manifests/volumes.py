"""Defines the storage of a pod: /dev/shm, the secret, checkpoints and journals.

Runs in:  cli. Pure.
Takes in: a `ManifestJob` and a `PodOptions`.
Gives:    volumes and mounts as trees for `yaml_text`; the computed size of /dev/shm.
Source:   NCCL's user guide requires 1 GiB in a container (Troubleshooting, Shared memory). torch's
          default `prefetch_factor` keeps two batches ready per loader worker.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from ftrun.errors import UsageError
from ftrun.tools.manifests.job import GIB, MIB, ManifestJob, quantity, size_of
from ftrun.tools.manifests.yaml_text import Commented, Tree

SECRET_AT = "/run/ftrun-secret"
OWN_SECRET_AT = "/run/ftrun-own"
MAX_NAME = 253

_NCCL_BYTES = GIB
_PREFETCH = 2
_HELD_BATCHES = 2
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class PodOptions:
    """Options that only Kubernetes has.

    Args:
        image: contains ftrun, torch and the script.
        claim: claim of the volume for checkpoints and logs, `NAME` or `NAME:PATH`.
        secret: name of the Secret whose key `run` is the run's secret.
        user: uid of all processes in the pod; 0 for the image's own user.
        workdir: working directory of ftrun; the script's path is relative to it.
        shm: size of /dev/shm; None: computed from the next two.
        loader_workers: DataLoader workers of each rank.
        batch: size of one batch.
        gpu_resource: the cluster's resource name of a GPU.
    """

    image: str
    claim: str | None = None
    secret: str | None = None
    user: int = 1000
    workdir: str = "/workspace"
    shm: str | None = None
    loader_workers: int = 4
    batch: str = "16Mi"
    gpu_resource: str = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True)
class PodVolumes:
    """The volumes and mounts of a pod."""

    job: ManifestJob
    place: PodOptions
    name: str

    def __post_init__(self) -> None:
        place = self.place
        claim = [("--claim", place.claim.partition(":")[0])] if place.claim is not None else []
        for flag, text in (("--secret", self.secret), *claim):
            if not _NAME.fullmatch(text) or len(text) > MAX_NAME:
                raise UsageError(f"{flag} {text!r} is no name that Kubernetes takes")
        if not 0 <= place.loader_workers <= 1000:
            raise UsageError(f"--loader-workers is 0 to 1000, not {place.loader_workers}")
        check_path(place.workdir, "--workdir")
        self._check_claim()

    @property
    def secret(self) -> str:
        return self.place.secret or f"{self.name}-secret"

    @property
    def shm_bytes(self) -> int:
        if self.place.shm is not None:
            return size_of(self.place.shm, "--shm")
        batch = size_of(self.place.batch, "--batch")
        in_flight = _PREFETCH * self.place.loader_workers + _HELD_BATCHES
        loaders = self.job.ranks * in_flight * batch if self.place.loader_workers else 0
        return -(-(_NCCL_BYTES + loaders) // MIB) * MIB

    @property
    def shm_in_words(self) -> str:
        place = self.place
        if place.shm is not None:
            return "As --shm says."
        found = f"{quantity(_NCCL_BYTES)} for NCCL, as its guide asks for"
        if place.loader_workers:
            found += (
                f", and for {self.job.ranks} ranks with {place.loader_workers} loader workers each "
                f"{_PREFETCH} batches of {place.batch} for every worker and {_HELD_BATCHES} held"
            )
        return f"{found}."

    @property
    def mount(self) -> str | None:
        if self.place.claim is None:
            return None
        return self.place.claim.partition(":")[2] or self.job.shared_directory or "/shared"

    # --- what is written ----------------------------------------------------------------------

    def mounts(self) -> Iterator[Tree]:
        yield {"name": "shm", "mountPath": "/dev/shm"}
        if self.job.nodes > 1:
            if self.place.user:
                yield {"name": "own", "mountPath": OWN_SECRET_AT, "readOnly": True}
            else:
                yield {"name": "secret", "mountPath": SECRET_AT, "readOnly": True}
        if self.mount is not None:
            yield {"name": "shared", "mountPath": self.mount}
            yield Commented(
                "Journals outlive the pods: ftrun report reads them there.",
                {
                    "name": "shared",
                    "mountPath": f"{self.place.workdir.rstrip('/')}/ftrun-logs",
                    "subPath": f"{self.name}/ftrun-logs",
                },
            )
        elif self.place.user:
            yield {"name": "logs", "mountPath": f"{self.place.workdir.rstrip('/')}/ftrun-logs"}

    def volumes(self) -> Iterator[Tree]:
        yield Commented(
            f"{self.shm_in_words} What is in it counts as memory of the container. Without it "
            "/dev/shm has 64Mi, and a loader's workers die of a bus error. Snapshots are "
            "elsewhere.",
            {
                "name": "shm",
                "emptyDir": {"medium": "Memory", "sizeLimit": quantity(self.shm_bytes)},
            },
        )
        if self.job.nodes > 1:
            mode = 0o440 if self.place.user else 0o400
            yield Commented(
                "By it nodes know one another. Without it whoever reaches a port of the run can "
                f"take part in it. Made once, with the commands above. Mode {mode:04o}.",
                {
                    "name": "secret",
                    "secret": {"secretName": self.secret, "defaultMode": mode},
                },
            )
            if self.place.user:
                yield {"name": "own", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}
        if self.place.claim is not None:
            name = self.place.claim.partition(":")[0]
            volume: Tree = {"name": "shared", "persistentVolumeClaim": {"claimName": name}}
            if self.job.nodes > 1:
                volume = Commented(
                    "On a file system that all pods can write at once (ReadWriteMany): each "
                    "writes its own part of a checkpoint.",
                    volume,
                )
            yield volume
        elif self.place.user:
            yield Commented(
                "No --claim: journals go with the pod.", {"name": "logs", "emptyDir": {}}
            )

    def _check_claim(self) -> None:
        directory = self.job.shared_directory
        if directory is not None:
            check_path(directory, "--checkpoint-dir")
        if directory is not None and self.mount is None:
            raise UsageError(
                f"--checkpoint-dir {directory} would be in the pod, and go with it. Name the claim "
                "of a volume that all pods can write: --claim NAME, or NAME:PATH for where it is"
            )
        if self.mount is None:
            return
        check_path(self.mount, "--claim")
        inside = [PurePosixPath(directory), *PurePosixPath(directory).parents] if directory else []
        if directory is not None and PurePosixPath(self.mount) not in inside:
            raise UsageError(
                f"--checkpoint-dir {directory} is not on the volume that --claim mounts at "
                f"{self.mount}. Name one below it"
            )


def check_path(text: str, what: str) -> None:
    """Raises a UsageError unless the path is absolute and accepted by Kubernetes."""
    if not text.startswith("/") or ".." in PurePosixPath(text).parts or ":" in text:
        raise UsageError(
            f"{what} is an absolute path in the pod, such as /shared/run1, not {text!r}"
        )
