"""The smallest of all memory limits is found; a fork that could not use a device is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftrun.linux import MARGIN, available_memory

GB = 10**9


def machine(root: Path, *, mem_available_kb: int, cgroup: str, mountinfo: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:  {mem_available_kb} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/self/mountinfo").write_text(mountinfo)


def group(folder: Path, names: tuple[str, str, str], limit: str, used: int, inactive: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(limit)
    (folder / names[1]).write_text(str(used))
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {inactive}\n")


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
MOUNT_V2 = "38 31 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
MOUNT_V1 = "32 31 0:29 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def test_without_a_cgroup_limit_the_machine_decides(tmp_path: Path) -> None:
    machine(tmp_path, mem_available_kb=4 * 10**6, cgroup="0::/\n", mountinfo=MOUNT_V2)
    found = available_memory(tmp_path)
    assert found.num_bytes == int(4 * 10**6 * 1024 * (1 - MARGIN))
    assert "MemAvailable" in found.limit


def test_a_parent_cgroups_limit_counts_and_cache_is_free(tmp_path: Path) -> None:
    machine(tmp_path, mem_available_kb=10**8, cgroup="0::/job/step\n", mountinfo=MOUNT_V2)
    base = tmp_path / "sys/fs/cgroup"
    group(base / "job/step", V2, "max\n", 5 * GB, 0)
    group(base / "job", V2, f"{8 * GB}\n", 5 * GB, 1 * GB)
    found = available_memory(tmp_path)
    assert found.num_bytes == int(4 * GB * (1 - MARGIN))
    assert found.limit == f"memory.max of cgroup {base / 'job'}"


def test_version_1_in_a_container_whose_path_is_the_hosts(tmp_path: Path) -> None:
    machine(
        tmp_path,
        mem_available_kb=10**8,
        cgroup="4:memory:/kubepods/pod7\n0::/\n",
        mountinfo=MOUNT_V1 + MOUNT_V2 + "20 1 0:1 / / rw - ext4 /dev/vda rw\n",
    )
    group(tmp_path / "sys/fs/cgroup/memory", V1, str(3 * GB), 1 * GB, 0)
    assert available_memory(tmp_path).num_bytes == int(2 * GB * (1 - MARGIN))


def test_an_unlimited_version_1_group_is_no_limit(tmp_path: Path) -> None:
    machine(tmp_path, mem_available_kb=10**6, cgroup="4:memory:/a\n", mountinfo=MOUNT_V1)
    group(tmp_path / "sys/fs/cgroup/memory/a", V1, "9223372036854771712", GB, 0)
    assert "MemAvailable" in available_memory(tmp_path).limit


def test_a_group_that_is_over_its_limit_has_nothing_free(tmp_path: Path) -> None:
    machine(tmp_path, mem_available_kb=10**6, cgroup="0::/a\n", mountinfo=MOUNT_V2)
    group(tmp_path / "sys/fs/cgroup/a", V2, str(GB), 2 * GB, 0)
    assert available_memory(tmp_path).num_bytes == 0


def test_a_machine_without_proc_files_of_cgroups(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 5 kB\n")
    assert "no MemAvailable" in available_memory(tmp_path).limit


DEVICE_MODULE = """
import sys, types, torch
from ftrun.linux import unfit_to_fork
module = types.SimpleNamespace(is_initialized=lambda: False, _is_in_bad_fork=lambda: False)
torch.utils.rename_privateuse1_backend("gadget")
torch._register_device_module("gadget", module)
assert unfit_to_fork() == "", unfit_to_fork()
setattr(module, sys.argv[1], lambda: True)
print(unfit_to_fork())
"""

DEVICE_FILE = """
import sys
from ftrun import linux
linux.DEVICE_FILES = (sys.argv[1],)
assert linux.unfit_to_fork() == "", linux.unfit_to_fork()
file = open(sys.argv[1] + "0", "w")
print(linux.unfit_to_fork())
file.close()
assert linux.unfit_to_fork() == ""
assert linux.open_device_files(1 << 30) == []
"""

THREADS = """
import threading
from ftrun.linux import unfit_to_fork
end = threading.Event()
threading.Thread(target=end.wait).start()
print(unfit_to_fork())
end.set()
"""


def output_of(program: str, *words: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", program, *words],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.parametrize("check", ["is_initialized", "_is_in_bad_fork"])
def test_a_device_of_any_type_that_is_in_use_makes_a_fork_unsafe(check: str) -> None:
    assert output_of(DEVICE_MODULE, check).startswith(f"torch.gadget.{check}() is true")


def test_an_open_device_file_makes_a_fork_unsafe(tmp_path: Path) -> None:
    assert f"{tmp_path}/card0 is open" in output_of(DEVICE_FILE, f"{tmp_path}/card")


def test_a_second_thread_makes_a_fork_unsafe() -> None:
    assert output_of(THREADS) == "the process has 2 threads, and only 1 can be forked safely"
