"""A value that torch rejects is an error of the caller, reported before anything starts."""

import os
from argparse import ArgumentParser
from pathlib import Path

import pytest
import torch
from torch.distributed import run as torchrun

from ftrun.agent.launch import elastic
from ftrun.agent.launch.agent_start import set_thread_count
from ftrun.agent.launch.warm_start import bound_to_cpus
from ftrun.config.profile import Profile
from ftrun.config.run_spec import RunSpec
from ftrun.errors import UsageError


def spec(folder: Path, *flags: str) -> RunSpec:
    return RunSpec(
        run_id="r",
        script="train.py",
        torchrun_argv=[*flags, "--", "train.py"],
        log_folder=str(folder),
        cwd=str(folder),
        profile=Profile(),
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--redirects=9"], "--redirects 9 cannot"),
        (["--tee=0:7"], "--tee 0:7 cannot"),
        (["--local-ranks-filter=a"], "comma-separated"),
        (["--logs-specs=nosuch"], "nosuch"),
        (["--log-dir={file}"], "is a file"),
        (["--no-python", "--module"], "no-python"),
    ],
)
def test_wrong_values_of_flags(tmp_path: Path, flags: list[str], said: str) -> None:
    (tmp_path / "file").touch()
    words = [one.format(file=tmp_path / "file") for one in flags]
    args = elastic.parse(spec(tmp_path, *words))
    with pytest.raises(UsageError, match=said):
        elastic.launch_config(args)


def test_number_of_ranks(tmp_path: Path) -> None:
    found = elastic.local_world_size(elastic.parse(spec(tmp_path, "--nproc-per-node=3")))
    assert found == 3
    wrong = ["0", "-1", "x", *([] if torch.cuda.is_available() else ["gpu"])]
    for value in wrong:
        with pytest.raises(UsageError, match="--nproc-per-node"):
            elastic.local_world_size(elastic.parse(spec(tmp_path, f"--nproc-per-node={value}")))


def test_right_flags_make_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    args = elastic.parse(spec(tmp_path, "--nproc-per-node=2", "--redirects=3"))
    config, _, words = elastic.launch_config(args)
    assert (config.nproc_per_node, words[-1]) == (2, "train.py")


def test_a_default_port_of_torch_is_not_a_given_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to torch 2.12 the parser has a default, and a second run would find the port in use."""
    parser_of = torchrun.get_args_parser

    def with_default() -> ArgumentParser:
        parser = parser_of()
        if "PET_MASTER_PORT" not in os.environ:
            parser.set_defaults(master_port=29500)
        return parser

    monkeypatch.setattr(torchrun, "get_args_parser", with_default)
    assert elastic.parse(spec(tmp_path)).master_port is None
    assert elastic.parse(spec(tmp_path, "--master-port=6000")).master_port == 6000
    monkeypatch.setenv("PET_MASTER_PORT", "6001")
    assert elastic.parse(spec(tmp_path)).master_port == 6001


@pytest.mark.parametrize(
    ("argv", "variables", "count"),
    [
        (["--nproc-per-node=2", "--", "train.py"], {}, "1"),
        (["--nproc-per-node=1", "--", "train.py"], {}, None),
        (["--", "train.py", "--nproc_per_node", "4"], {}, None),
        (["--nproc-per-node=8", "--", "train.py", "--nproc-per-node=1"], {}, "1"),
        (["--", "train.py", "--nproc-per-node"], {"PET_NPROC_PER_NODE": "2"}, "1"),
        (["--nproc-per-node=2", "--", "train.py"], {"OMP_NUM_THREADS": "3"}, "3"),
        (["--nproc-per-node=cpu", "--", "train.py"], {}, None if os.cpu_count() == 1 else "1"),
    ],
)
def test_one_thread_for_each_of_several_ranks(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], variables: dict[str, str], count: str | None
) -> None:
    for name in ("OMP_NUM_THREADS", "PET_NPROC_PER_NODE"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    others = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    set_thread_count(argv)
    assert os.environ.get("OMP_NUM_THREADS") == count
    assert others.items() >= os.environ.items() - {("OMP_NUM_THREADS", count)}


def test_ranks_are_bound_as_by_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    binding = pytest.importorskip("torch.numa.binding", reason="needs torch 2.9")
    numactl = tmp_path / "numactl"
    numactl.write_text("#!/bin/sh\n")
    numactl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    cores = "_get_validated_logical_cpus_to_bind_to"  # it asks the driver of the GPU
    monkeypatch.setattr(binding, cores, lambda **_: {0})
    options = binding.NumaOptions(affinity_mode=binding.AffinityMode.NODE)
    found = bound_to_cpus(["python", "train.py"], 0, options)
    assert found[0] == "numactl"
    assert found[-2:] == ["python", "train.py"]
    assert bound_to_cpus(["python", "train.py"], 0, None) == ["python", "train.py"]
    monkeypatch.delattr(binding, "_maybe_wrap_command_args_with_numa_binding")  # another torch
    assert bound_to_cpus(["python", "train.py"], 0, options) == ["python", "train.py"]
