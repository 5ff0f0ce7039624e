"""ftrun.dcp in a process that ftrun has not started."""

import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ftrun
from ftrun.errors import UsageError


@pytest.mark.parametrize("kind", [ftrun.dcp.Writer, ftrun.dcp.Reader])
def test_without_a_fallback_it_reports_what_to_do(kind: type) -> None:
    with pytest.raises(UsageError, match="Start the script with `ftrun`, or pass fallback="):
        kind()
    assert not ftrun.dcp.exists()
    assert ftrun.dcp.newest_step() is None


def test_with_a_fallback_it_is_torchs_own(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    state = {"weight": torch.arange(6.0).reshape(2, 3), "step": 7}
    assert not ftrun.dcp.exists(folder)
    writer = ftrun.dcp.Writer(fallback=folder)
    assert type(writer) is dcp.FileSystemWriter
    assert pickle.loads(pickle.dumps(ftrun.dcp.Reader(fallback=folder))) is not None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, storage_writer=writer)
        assert ftrun.dcp.exists(folder)
        loaded = {"weight": torch.zeros(2, 3), "step": 0}
        dcp.load(loaded, storage_reader=ftrun.dcp.Reader(fallback=folder))
    assert torch.equal(loaded["weight"], state["weight"])
    assert loaded["step"] == 7
