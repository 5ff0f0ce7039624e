"""Operators give the same bytes in each mode, and where torch allows it those of the processor."""

from collections.abc import Callable

import pytest
import torch
from fake_device import fake
from torch import nn

STEPS = 4


def perceptron() -> nn.Module:
    layers = [nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4)]
    return nn.Sequential(*layers)


def convolutions() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8 * 3 * 3, 4)).to(memory_format=torch.channels_last)


class Attention(nn.Module):
    """One layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.embedding(x)).mean(1)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "perceptron": (perceptron, lambda: torch.randn(8, 16)),
    "convolutions": (
        convolutions,
        lambda: torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last),
    ),
    "attention": (Attention, lambda: torch.randint(10, (4, 6))),
}


def trained(device: str, name: str) -> dict[str, torch.Tensor]:
    make, batch = MODELS[name]
    torch.manual_seed(3)
    model = make().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    for _ in range(STEPS):
        loss = model(batch().to(device)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.detach().cpu() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("name", MODELS)
def test_the_mode_changes_no_byte(name: str) -> None:
    fake.set_mode("eager")
    expected = trained("fake:0", name)
    for mode in ("lazy", "threads"):
        fake.set_mode(mode, seed=3, max_pause_us=200)
        found = trained("fake:0", name)
        assert all(torch.equal(found[key], expected[key]) for key in expected), mode


def test_training_gives_the_bytes_of_the_processor() -> None:
    """Only of operators that torch does not compose differently for other devices."""
    found, expected = trained("fake:0", "perceptron"), trained("cpu", "perceptron")
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_shapes_that_depend_on_values() -> None:
    x = torch.tensor([1.0, 0.0, 2.0], device="fake")
    assert x.nonzero().cpu().tolist() == [[0], [2]]
    assert x[x > 0].cpu().tolist() == [1.0, 2.0]
    assert torch.equal(x, x.clone())


def test_a_result_given_as_out_is_resized() -> None:
    x, out = torch.ones(3, device="fake"), torch.empty(0, device="fake")
    torch.add(x, x, out=out)
    assert out.cpu().tolist() == [2.0] * 3


def test_dropout_repeats_with_its_state() -> None:
    x = torch.ones(1000, device="fake")
    torch.manual_seed(5)
    first = nn.functional.dropout(x).cpu()
    torch.manual_seed(5)
    assert torch.equal(first, nn.functional.dropout(x).cpu())


def test_too_much_memory_is_an_error_of_torch() -> None:
    fake.set_memory_limit(1 << 20)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="bytes requested"):
            torch.empty(1 << 20, device="fake")
    finally:
        fake.set_memory_limit(16 << 30)


def test_new_memory_contains_a_pattern() -> None:
    x = torch.empty(100_003, dtype=torch.uint8, device="fake")
    assert x.cpu().unique().tolist() == [0xCD]


def test_waits_of_two_streams_for_each_other_may_form_a_long_chain() -> None:
    first, second = torch.Stream("fake:0"), torch.Stream("fake:0")
    x = torch.zeros(1, device="fake:0")
    torch.accelerator.synchronize(0)
    for _ in range(5000):
        with first:
            first.wait_stream(second)
            x.add_(1.0)
        second.wait_stream(first)
    second.synchronize()
    assert x.item() == 5000.0
