"""The packaged layout of Megatron-Core, with state dicts of the names and shapes of its GPTModel.

Names and shapes are those of megatron.core 0.8 to 0.14: `GPTModel`, `TransformerBlock`,
`SelfAttention` (linear_qkv holds the rows of one query group after the other: its queries, key and
value), `MLP` (linear_fc1 holds the gate and then the other half, each split by itself), and the
vocabulary, which is padded to a multiple of 128 for each tensor-parallel rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from ftrun.config.layout_file import layout_text
from ftrun.errors import RulesMismatch
from ftrun.sharding.rule_parser import read_rules
from ftrun.sharding.rules import ShardingRules
from ftrun.sharding.world_layout import WorldLayout, lay_out, read_world
from tests.unit.sharding.worlds import Array, assert_same, moved, stored_of

HIDDEN, HEADS, GROUPS, HEAD, FFN = 8, 8, 4, 2, 12
VOCAB, SEQUENCE = 300, 6


@dataclass(frozen=True)
class Megatron:
    """A GPTModel on a mesh; `layers` of each model chunk, in the order of the pipeline."""

    layers: tuple[int, ...] = (2, 2)
    pp: int = 2
    dp: int = 1
    ep: int = 1
    tp: int = 2
    turns: int = 1
    experts: int = 0
    is_grouped: bool = False
    """TEGroupedMLP in place of SequentialMLP."""
    is_gated: bool = True
    is_tied: bool = False
    has_bias: bool = False

    def rules(self) -> ShardingRules:
        values = {
            "layers": sum(self.layers), "vocab": VOCAB, "pp": self.pp, "dp": self.dp,
            "ep": self.ep, "tp": self.tp, "turns": self.turns,
            "fc1": 2 if self.is_gated else 1, "tied": int(self.is_tied),
        }  # fmt: skip
        if self.experts:
            values |= {"experts": self.experts, "etp": self.tp}
        words = ",".join(f"{key}={value}" for key, value in values.items())
        if self.turns > 1:
            words += ",prefix=model.{turn}"
        text = layout_text(f"megatron-core:{words}")
        layers = f"of: {sum(self.layers)}"
        return read_rules(
            text.replace(layers, f"{layers}\n    sizes: {[*self.layers]}"), source="x"
        )

    def ranks(self) -> list[dict[str, Array]]:
        """In Megatron's order tp-ep-dp-pp: tensor parallelism is the fastest."""
        return [
            with_adamw(dict(self._rank(pp, ep, tp)))
            for pp in range(self.pp)
            for _ in range(self.dp)
            for ep in range(self.ep)
            for tp in range(self.tp)
        ]

    def _rank(self, pp: int, ep: int, tp: int) -> Iterator[tuple[str, Array]]:
        ends = np.cumsum([0, *self.layers]).tolist()
        for turn in range(self.turns):
            chunk = turn * self.pp + pp
            prefix = f"model.{turn}" if self.turns > 1 else "model"
            if chunk == 0:
                yield f"{prefix}.embedding.word_embeddings.weight", self._words(1, tp)
                yield f"{prefix}.embedding.position_embeddings.weight", made(2, SEQUENCE, HIDDEN)
            for number, layer in enumerate(range(ends[chunk], ends[chunk + 1])):
                for name, array in self._layer(100 * (layer + 1), ep, tp):
                    yield f"{prefix}.decoder.layers.{number}.{name}", array
            if chunk == len(self.layers) - 1:
                yield f"{prefix}.decoder.final_layernorm.weight", made(3, HIDDEN)
                if not self.is_tied:
                    yield f"{prefix}.output_layer.weight", self._words(4, tp)
                elif chunk > 0:  # a single stage uses the embedding
                    yield f"{prefix}.output_layer.weight", self._words(1, tp)

    def _words(self, seed: int, tp: int) -> Array:
        multiple = 128 * self.tp
        words = np.zeros((-(-VOCAB // multiple) * multiple, HIDDEN), np.int64)
        words[:VOCAB] = made(seed, VOCAB, HIDDEN)
        return np.split(words, self.tp)[tp]

    def _layer(self, seed: int, ep: int, tp: int) -> Iterator[tuple[str, Array]]:
        yield (
            "self_attention.linear_proj.weight",
            np.split(made(seed, HIDDEN, HEADS * HEAD), self.tp, axis=1)[tp],
        )
        # One group: HEADS / GROUPS queries, a key and a value.
        groups = made(seed + 1, GROUPS, (HEADS // GROUPS + 2) * HEAD, HIDDEN)
        yield "self_attention.linear_qkv.weight", np.split(groups, self.tp)[tp].reshape(-1, HIDDEN)
        yield "self_attention.linear_qkv.layer_norm_weight", made(seed + 2, HIDDEN)
        yield "self_attention.q_layernorm.weight", made(seed + 3, HEAD)
        if self.has_bias:
            yield (
                "self_attention.linear_qkv.bias",
                np.split(groups[:, :, 0].copy(), self.tp)[tp].reshape(-1),
            )
            yield "self_attention.linear_proj.bias", made(seed + 4, HIDDEN)
        if not self.experts:
            yield "mlp.linear_fc1.layer_norm_weight", made(seed + 5, HIDDEN)
            for name, array in self._mlp(seed + 6, tp):
                yield f"mlp.{name}", array
            return
        yield "pre_mlp_layernorm.weight", made(seed + 5, HIDDEN)
        yield "mlp.router.weight", made(seed + 7, self.experts, HIDDEN)
        for name, array in self._mlp(seed + 8, tp):
            yield f"mlp.shared_experts.{name}", array
        here = range(*(self.experts // self.ep * at for at in (ep, ep + 1)))
        for number, expert in enumerate(here):
            for name, array in self._mlp(seed + 20 + 2 * expert, tp):
                way = f"{name}{number}" if self.is_grouped else f"local_experts.{number}.{name}"
                yield f"mlp.experts.{way}", array

    def _mlp(self, seed: int, tp: int) -> Iterator[tuple[str, Array]]:
        halves = [made(seed, FFN, HIDDEN)]
        if self.is_gated:
            halves.append(-halves[0])
        yield "linear_fc1.weight", np.concatenate([np.split(h, self.tp)[tp] for h in halves])
        yield "linear_fc2.weight", np.split(made(seed + 1, HIDDEN, FFN), self.tp, axis=1)[tp]
        if self.has_bias:
            yield (
                "linear_fc1.bias",
                np.concatenate([np.split(h[:, 0].copy(), self.tp)[tp] for h in halves]),
            )
            yield "linear_fc2.bias", made(seed + 1, HIDDEN)


def with_adamw(parameters: dict[str, Array]) -> dict[str, Array]:
    """State of torch's AdamW, by the names that a snapshot gives it."""
    state = {}
    for name, array in parameters.items():
        values = {"step": np.array(7), "exp_avg": -array, "exp_avg_sq": 3 * array}
        state |= {f"optimizer.state.{name}.{key}": value for key, value in values.items()}
    return parameters | state


def world_of(model: Megatron, arrays: Sequence[Mapping[str, Array]]) -> WorldLayout:
    def parameter(name: str) -> str | None:
        found = name.removeprefix("optimizer.state.").rpartition(".")[0]
        return found if found and found != name.rpartition(".")[0] else None

    stored = [[replace(e, of=parameter(e.name)) for e in held] for held in stored_of(arrays)]
    return read_world(model.rules(), stored)


def made(seed: int, *shape: int) -> Array:
    return 1_000_000 * seed + np.arange(1, 1 + int(np.prod(shape))).reshape(shape)


DENSE = Megatron()
TIED = Megatron(is_tied=True)
PLAIN = Megatron(is_gated=False, has_bias=True)
CHUNKS = Megatron((1, 1, 1, 1), turns=2)
EXPERTS = Megatron(experts=8, ep=2, tp=1)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (DENSE, replace(DENSE, tp=4)),
        (DENSE, replace(DENSE, pp=1, layers=(4,), tp=1, dp=3)),
        (DENSE, replace(DENSE, pp=3, layers=(1, 2, 1), tp=1)),
        (PLAIN, replace(PLAIN, pp=1, layers=(4,), tp=1)),
        (CHUNKS, replace(CHUNKS, pp=1, layers=(2, 2))),
        (TIED, replace(TIED, pp=1, layers=(4,), tp=1)),
        (replace(TIED, pp=1, layers=(4,)), replace(TIED, pp=4, layers=(1, 1, 1, 1))),
        (replace(CHUNKS, is_tied=True), replace(TIED, turns=2, layers=(1, 1, 1, 0, 0, 1), pp=3)),
        (EXPERTS, replace(EXPERTS, ep=4, pp=1, layers=(4,))),
        (EXPERTS, replace(EXPERTS, ep=1, tp=2, dp=2)),
        (replace(EXPERTS, is_grouped=True), replace(EXPERTS, is_grouped=True, ep=8, layers=(3, 1))),
        (replace(EXPERTS, turns=2, layers=(1, 1, 1, 1)),
         replace(EXPERTS, turns=2, layers=(2, 2), pp=1, ep=4)),
    ],
    ids=[
        "tp 2 to 4", "to one stage", "to three stages", "without gates", "model chunks",
        "tied to one stage", "tied to four stages", "tied in model chunks",
        "ep 2 to 4", "ep to tp", "grouped", "experts in model chunks",
    ],
)  # fmt: skip
def test_a_model_moves_to_another_mesh_and_back(before: Megatron, after: Megatron) -> None:
    arrays = before.ranks()
    source = world_of(before, arrays)
    target = lay_out(after.rules(), source)
    found = [
        {target.own_name(rank, name): array for name, array in held.items()}
        for rank, held in enumerate(moved(source, arrays, target))
    ]
    assert_same(found, after.ranks())


def test_padding_of_the_vocabulary_is_kept_if_its_size_stays() -> None:
    arrays, name = DENSE.ranks(), "model.embedding.word_embeddings.weight"
    names = [name, f"optimizer.state.{name}.exp_avg"]
    for one in names:
        arrays[1][one] = np.where(arrays[1][one] == 0, 7, arrays[1][one])  # of the first stage
    source = world_of(DENSE, arrays)
    for tp in (2, 1):
        after = replace(DENSE, pp=1, layers=(4,), tp=tp)
        found = moved(source, arrays, lay_out(after.rules(), source))
        joined = np.concatenate([held[name] for held in found])
        assert set(joined[VOCAB:].flat) == ({7} if tp == 2 else {0})
        if tp == 2:
            assert all(np.array_equal(found[1][one], arrays[1][one]) for one in names)


def test_an_expert_that_no_rank_has_is_named() -> None:
    with pytest.raises(RulesMismatch, match=r"declares 9 layers, but no rank holds layer 4"):
        world_of(replace(EXPERTS, experts=9), EXPERTS.ranks())


def test_a_tensor_without_a_rule_is_an_error_although_its_layer_has_a_stage() -> None:
    arrays = DENSE.ranks()
    for held in arrays:
        held["model.decoder.layers.0.self_attention.linear_q_down_proj.weight"] = made(1, 2, 3)
    problem = r"linear_q_down_proj\.weight is placed by unique .*, and with strict: true it needs"
    with pytest.raises(RulesMismatch, match=problem):
        world_of(DENSE, arrays)
