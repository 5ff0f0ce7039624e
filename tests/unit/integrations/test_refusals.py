"""An integration refuses an unsupported feature by name, and names the replacement."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ftrun.errors import UsageError

pytestmark = pytest.mark.full

if importlib.util.find_spec("accelerate") is not None:  # `scripts/test --full` installs it
    import accelerate
    import transformers

    import ftrun.integrations.accelerate


@pytest.mark.parametrize(
    ("kind", "is_fsdp2", "words"),
    [
        ("DEEPSPEED", False, ("DEEPSPEED", "ftrun.integrations.deepspeed")),
        ("MEGATRON_LM", False, ("MEGATRON_LM", "use DDP")),
        ("FSDP", False, ("FSDP1", "fsdp_version=2", "{'version': 2}")),
        ("FSDP", True, None),
        ("MULTI_GPU", False, None),
        ("MULTI_CPU", False, None),
        ("NO", False, None),
    ],
)
def test_kinds_of_accelerate(kind: str, is_fsdp2: bool, words: tuple[str, ...] | None) -> None:
    from accelerate.utils import DistributedType

    found = ftrun.integrations.accelerate.refusal(DistributedType[kind], is_fsdp2=is_fsdp2)
    if words is None:
        assert found is None
    else:
        assert found is not None
        assert all(word in found for word in words)


def test_an_accelerator_with_fsdp1_is_refused_at_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils import DistributedType

    accelerator = accelerate.Accelerator(cpu=True)
    # Accelerate offers FSDP on GPUs only, so the kind is set here.
    monkeypatch.setitem(accelerator.state.__dict__, "distributed_type", DistributedType.FSDP)
    monkeypatch.setitem(
        accelerator.state.__dict__,
        "fsdp_plugin",
        accelerate.FullyShardedDataParallelPlugin(fsdp_version=1),
    )
    with pytest.raises(UsageError, match="FSDP1"):
        ftrun.integrations.accelerate.attach(accelerator)


@pytest.mark.parametrize(("ranks", "is_taken"), [(2, False), (1, True)])
def test_batches_that_rank_0_dispatches_from_an_indexed_data_set(
    ranks: int, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatching = accelerate.utils.DataLoaderConfiguration(dispatch_batches=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=dispatching)
    _, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(range(4), batch_size=2))
    monkeypatch.setitem(loader.state.__dict__, "num_processes", ranks)
    if is_taken:
        ftrun.integrations.accelerate.attach(accelerator).close()
    else:
        with pytest.raises(UsageError, match="dispatch_batches=True"):
            ftrun.integrations.accelerate.attach(accelerator)


def test_strategies_of_lightning() -> None:
    pytest.importorskip("deepspeed")
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy

    from ftrun.integrations.lightning import refusal

    assert "ftrun.integrations.deepspeed" in (refusal(DeepSpeedStrategy()) or "")
    assert "ModelParallelStrategy" in (refusal(FSDPStrategy()) or "")
    assert refusal(DDPStrategy()) is None


def test_a_callback_of_lightning_with_state_that_only_a_checkpoint_holds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.callbacks import EMAWeightAveraging

    from ftrun.integrations.lightning import FtrunCallback, _report_unsaved

    class Teacher(Callback):
        def on_save_checkpoint(self, *given: Any) -> None:
            given[-1]["teacher"] = 1

    averaging = EMAWeightAveraging()
    averaging._average_model = torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))
    own = FtrunCallback()
    callbacks = [Teacher(), averaging, own]
    fits = Trainer(accelerator="cpu", logger=False, callbacks=callbacks, barebones=True)
    caplog.clear()
    _report_unsaved(fits, own)
    assert [record.args for record in caplog.records] == [("Teacher",)]


def trainer(folder: Path, **arguments: Any) -> Any:
    given = transformers.TrainingArguments(str(folder), use_cpu=True, report_to="none", **arguments)
    return transformers.Trainer(nn.Linear(2, 2), given)


@pytest.mark.parametrize(
    ("ignores", "batches", "is_taken"), [(True, 3, False), (True, 0, True), (False, 3, True)]
)
def test_a_trainer_that_ignores_where_it_is_in_the_data(
    tmp_path: Path, ignores: bool, batches: int, is_taken: bool
) -> None:
    from ftrun.integrations.transformers import refusal

    found = refusal(trainer(tmp_path, ignore_data_skip=ignores), batches)
    assert is_taken == (found is None)
    assert is_taken or "ignore_data_skip" in str(found)
