"""A training of torchtitan's Trainer that loses a rank ends with the same parameters.

torchtitan trains on accelerators only: its requests to one are answered for the CPU here. All else
is its own: Trainer, model, FSDP2, optimizers, schedulers, checkpoint manager.
"""

from pathlib import Path

from tests.integration.conftest import Start
from tests.integration.examples import (
    RUNS_A_FRAMEWORK,
    each_of,
    ends_like_undisturbed,
    example,
    restored_steps,
)

pytestmark = RUNS_A_FRAMEWORK

CPU = """
import types
from dataclasses import dataclass

import torch
from torchtitan.tools import utils


class Cpu:
    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    def current_device(self):
        return 0

    def get_device_name(self, device=None):
        return "cpu"

    def get_device_properties(self, device=None):
        return types.SimpleNamespace(total_memory=1 << 30)

    def memory_stats(self, device=None):
        return {}

    def reset_peak_memory_stats(self):
        pass

    def empty_cache(self):
        pass


utils.device_type, utils.device_module = "cpu", Cpu()
torch.distributed.set_timeout = lambda timeout, group: None  # which torch 2.13 does not have
"""
"""Comes first, because torchtitan's modules copy these names when they are imported."""

SMALL = """
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import ScaledDotProductAttention


class Numbers(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, text):
        return [int(word) for word in text.split()]

    def decode(self, tokens):
        return " ".join(map(str, tokens))

    def get_vocab_size(self):
        return 2048


class Drawn(BaseDataLoader):
    '''Batches from the random numbers of each rank, which torchtitan does not save.'''

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_rank, seq_len, local_batch_size, **_):
        self.shape = (local_batch_size, seq_len + 1)
        self.count = 0
        torch.manual_seed(dp_rank)

    def __iter__(self):
        while True:
            self.count += 1
            tokens = torch.randint(2048, self.shape)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def parallelized(model, **how):
    made = plain(model, **how)
    for part in made.modules():
        if isinstance(part, torch.distributed.fsdp.FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return made


plain, config.model_spec.parallelize_fn = config.model_spec.parallelize_fn, parallelized
config.loss = config.loss.loss_fn  # whose backward is one
for layer in config.model_spec.model.layers:
    layer.attention.inner_attention = ScaledDotProductAttention.Config()
config.tokenizer, config.dataloader = Numbers.Config(), Drawn.Config()
config.validator.enable = False
config.training.local_batch_size, config.training.global_batch_size = 2, 8
config.training.seq_len = 32
config.training.steps = 9
config.training.disable_cuda_graphs = True
config.debug.seed = 0
config.parallelism.spmd_backend = "partial_dtensor"  # its default needs a newer torch than 2.13
"""

AFTER = """
def parts():
    for at, model in enumerate(trainer.model_parts):
        yield from ((f"{at}.{name}", one.to_local()) for name, one in model.named_parameters())
    for at, optimizer in enumerate(trainer.optimizers.optimizers):
        for index, state in enumerate(optimizer.state.values()):
            yield from (
                (f"{at}.{index}.{name}", getattr(one, "to_local", lambda one=one: one)())
                for name, one in state.items()
            )


model = types.SimpleNamespace(state_dict=lambda: dict(parts()))
"""
"""The compared values: this rank's part of the parameters and of their moments."""

BUILT = "trainer = config.build()"
MANAGER = "CheckpointManager.Config(enable=True, interval=4)"


@each_of(
    {
        "unchanged": {},
        "in the background": {
            MANAGER: 'CheckpointManager.Config(enable=True, interval=4, async_mode="async")'
        },
    }
)
def test_a_rank_that_dies_within_an_accumulation(
    start: Start, tmp_path: Path, changes: dict[str, str]
) -> None:
    """A step has two backward passes; on disk there are the steps 4 and 8, and at the end 9."""
    code = CPU + example("torchtitan", {BUILT: SMALL + BUILT, **changes}) + AFTER
    run = ends_like_undisturbed(start, tmp_path, code, {0: 11, 1: 5})
    first, second = restored_steps(run)
    assert first in (4, 5)
    assert second in (5, 6, 7)
    folders = {one.name for one in tmp_path.glob("outputs/checkpoint/step-*")}
    assert folders == {"step-4", "step-8", "step-9"}
