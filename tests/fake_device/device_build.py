"""Compiles the fake device with g++, once per torch, compiler and sources.

The library is kept in the checkout, in a folder that git ignores. Processes that build at the same
time wait for the first of them; the library appears by a rename, so a killed build leaves none.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "device"
CACHE = Path(__file__).parents[2] / "build" / "fake_device"
FLAGS = ("-std=c++20", "-O0", "-g0", "-fPIC", "-Wall", "-Werror=return-type")
COMPILER = "g++"


class CompilerMissing(Exception):
    """There is no g++ (see scripts/system-packages.txt)."""


def search_path() -> str:
    """PYTHONPATH for processes that import this package."""
    words = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, words))


def library(cache: Path = CACHE) -> Path:
    """The path of the compiled library.

    Raises:
        CompilerMissing: it has to be compiled, and there is no compiler.
    """
    target = cache / f"libfake_device-{_key()}.so"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                _build(Path(folder)).rename(target)
    return target


def _key() -> str:
    if shutil.which(COMPILER) is None:
        raise CompilerMissing(f"{COMPILER} is not installed (see scripts/system-packages.txt)")
    version = subprocess.run([COMPILER, "--version"], capture_output=True, check=True).stdout
    found = hashlib.sha256(version)
    found.update(repr((torch.__version__, torch.__file__, FLAGS)).encode())
    for path in sorted(SOURCES.iterdir()):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _build(folder: Path) -> Path:
    torch_folder = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    includes = [
        f"-I{torch_folder / 'include'}",
        f"-I{torch_folder / 'include' / 'torch' / 'csrc' / 'api' / 'include'}",
    ]
    flags = [*FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *includes]
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(2) as pool:
        built = pool.map(
            lambda pair: _compile([*flags, "-c", str(pair[0]), "-o", str(pair[1])]),
            zip(sources, objects, strict=True),
        )
        list(built)
    made = folder / "libfake_device.so"
    libraries = [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10", "-lpthread"]
    _compile(["-shared", *map(str, objects), "-o", str(made), *libraries])
    return made


def _compile(words: Sequence[str]) -> None:
    done = subprocess.run([COMPILER, *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{COMPILER} failed with {done.returncode}:\n{done.stderr[-8000:]}")
