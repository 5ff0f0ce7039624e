"""The build backend: setuptools', with a source archive that has the same bytes at each build.

setuptools takes SOURCE_DATE_EPOCH for the wheel only. In the source archive it keeps the times,
owners and modes of the files of one machine. Without SOURCE_DATE_EPOCH nothing is changed.
"""

import gzip
import io
import os
import tarfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    name = build_meta.build_sdist(sdist_directory, config_settings)
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if epoch:
        path = Path(sdist_directory) / name
        path.write_bytes(normalised(path.read_bytes(), int(epoch)))
    return name


def normalised(archive: bytes, epoch_s: int) -> bytes:
    """The same files in the order of their names, all of one time, root's, and 0644 or 0755."""
    files = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as source,
        tarfile.open(fileobj=files, mode="w", format=tarfile.PAX_FORMAT) as target,
    ):
        for entry in sorted(source.getmembers(), key=lambda one: one.name):
            plain = tarfile.TarInfo(entry.name)
            plain.type, plain.size, plain.mtime = entry.type, entry.size, epoch_s
            plain.linkname = entry.linkname
            plain.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            target.addfile(plain, source.extractfile(entry) if entry.isreg() else None)
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", fileobj=packed, mode="wb", mtime=epoch_s) as file:
        file.write(files.getvalue())
    return packed.getvalue()
