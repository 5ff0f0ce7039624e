"""The picture of an estimate: its axis."""

from typing import Any

import pytest

from ftrun.tools.estimate import estimate_picture


class Drawn:
    """What is drawn at which height."""

    def __init__(self) -> None:
        self.labels: list[str] = []

    def line(self, *_: Any) -> None:
        pass

    def text(self, _x: float, _y: float, label: str, *_: Any) -> None:
        self.labels.append(label)


def test_the_axis_begins_at_zero_where_a_value_is_low() -> None:
    assert estimate_picture._floor(0.69) == 0.0
    assert 0.7 < estimate_picture._floor(0.9) <= 0.9


@pytest.mark.parametrize("least", [one / 100 for one in range(0, 99, 3)])
def test_no_label_is_below_the_axis(least: float) -> None:
    drawn = Drawn()
    estimate_picture._grid(drawn, [], [], least)  # type: ignore[arg-type]
    shown = [float(label.removesuffix(" %")) for label in drawn.labels if "%" in label]
    assert shown[0] == 100
    assert min(shown) >= 100 * least - 1e-6
