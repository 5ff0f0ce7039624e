"""A file of switches is read before anything is started, or refused in words."""

from pathlib import Path

import pytest

from ftrun.cli.launch.slurm import leaf_switch
from ftrun.cli.launch.topology_files import read_topology
from ftrun.errors import UsageError


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
def test_slurm_tells_the_leaf_switch(address: str, pattern: str, leaf: str) -> None:
    told = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert leaf_switch(told) == leaf
