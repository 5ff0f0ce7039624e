"""A training under DeepSpeed that loses a rank ends with the same parameters."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.integration.conftest import Start
from tests.integration.examples import (
    RUNS_A_FRAMEWORK,
    each_of,
    example,
    loses_a_rank_twice,
    wait_long,
)

pytestmark = RUNS_A_FRAMEWORK

STAGE = '"zero_optimization": {"stage": 2}'
BF16 = '    "bf16": {"enabled": True},\n'
PLAIN = {BF16: "", "engine(inputs.bfloat16())": "engine(inputs)"}

NOISY = {
    "dataset = TensorDataset(": "dataset = Noisy(",
    "deepspeed.init_distributed()\n": """deepspeed.init_distributed()


class Noisy(TensorDataset):
    def __getitem__(self, index):
        inputs, targets = super().__getitem__(index)
        return inputs + 0.1 * torch.randn(8), targets


""",
}

WHOLE = """
import types

from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

found = {}
for name, one in engine.module.named_parameters():
    with GatheredParameters([one], enabled=hasattr(one, "ds_id")):
        found[name] = one.detach().float().clone()
    if engine.zero_optimization():
        found[f"{name}.fp32"] = safe_get_full_fp32_param(one)
    for moment in ("exp_avg", "exp_avg_sq"):
        if engine.zero_optimization():
            found[f"{name}.{moment}"] = safe_get_full_optimizer_state(one, moment)
        else:
            found[f"{name}.{moment}"] = engine.optimizer.state[one][moment]
found["loss"] = loss.detach()
assert engine.global_steps == 18, engine.global_steps
model = types.SimpleNamespace(state_dict=lambda: found)
"""
"""The compared values: parameters, in fp32 as well, their moments, and this rank's last loss."""


REPORTS_ROWS = """
import hashlib
import sys

import torch.distributed as dist


def report_state(word):
    zero, digest = engine.optimizer, hashlib.sha256()
    row = zero.optimizer.param_groups[0]["params"][0]
    own = [row.detach(), *(one for one in zero.optimizer.state[row].values() if one.dim())]
    for part in own:
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part)
        num_items = sum(one.numel() for one in zero.bit16_groups[0])
        digest.update(torch.cat(parts)[:num_items].numpy().tobytes())
    for one in engine.module.parameters():
        digest.update(one.detach().float().numpy().tobytes())
    print(f"{word} tensors={len(own)} steps={engine.global_steps} {digest.hexdigest()}")


"""

RESIZED = {
    "import deepspeed\n": REPORTS_ROWS.lstrip() + "import deepspeed\n",
    "session.epochs(3)": "session.epochs(int(sys.argv[1]))",
    "session = attach(engine, loader=loader)\n": """session = attach(engine, loader=loader)
report_state("begins")
""",
}


@each_of(
    {
        "stage 2": {},
        "stage 1": {STAGE: STAGE.replace("2", "1")},
        "stage 3": {STAGE: STAGE.replace("2", "3")},
        "stage 3, small parameters whole": {
            STAGE: '"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 50}'
        },
        "stage 0": {STAGE: STAGE.replace("2", "0"), **PLAIN},
        "stage 2 in fp32": PLAIN,
        "noise in the data": NOISY,
    }
)
def test_a_rank_that_dies_within_an_accumulation_and_in_a_later_epoch(
    start: Start, tmp_path: Path, changes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of the session is a micro-batch."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    code = example("DeepSpeed", changes) + WHOLE
    loses_a_rank_twice(start, tmp_path, code, first=(4, 6), second=(12, 14, 16))


@pytest.mark.parametrize("stage", [1, 2])
def test_another_number_of_ranks_continues_with_the_same_parameters_and_moments(
    start: Start, tmp_path: Path, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are 331 items: padded to 332 on two ranks, 336 on three, 332 on one."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    changes = {**RESIZED, STAGE: STAGE.replace("2", str(stage))}
    (tmp_path / "train.py").write_text(example("DeepSpeed", changes) + "report_state('ends')\n")
    reported: list[dict[str, set[str]]] = []
    for epochs, ranks in enumerate((2, 3, 1), start=1):
        words = ("--checkpoint-dir", "saved", "--nproc-per-node", str(ranks))
        run = start(*words, "train.py", str(epochs))
        assert wait_long(run) == 0, run.text
        found = {word: set(re.findall(rf"{word} (.*)", run.text)) for word in ("begins", "ends")}
        assert all(len(lines) == 1 for lines in found.values()), run.text
        reported.append(found)
    for one, other in pairwise(reported):
        assert one["ends"] == other["begins"]
        assert next(iter(one["ends"])).startswith("tensors=3 ")


def test_stage_3_is_refused_on_another_number_of_ranks(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    (tmp_path / "train.py").write_text(example("DeepSpeed", {STAGE: STAGE.replace("2", "3")}))
    words = ("--checkpoint-dir", "saved", "--nproc-per-node")
    run = start(*words, "2", "train.py")
    assert wait_long(run) == 0, run.text
    run = start(*words, "1", "train.py")
    assert wait_long(run) != 0
    assert "partitions of 2 ranks" in run.text
