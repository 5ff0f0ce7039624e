"""The fake device does what ftrun assumes of every device."""

import pytest
from fake_device.conformance import CHECKS


@pytest.mark.parametrize("name", CHECKS)
def test_the_fake_device_conforms(name: str) -> None:
    CHECKS[name]("fake:0")
