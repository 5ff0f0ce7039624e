"""Each test begins with an idle device in the mode `lazy`, unless it takes `mode`."""

from collections.abc import Iterator

import pytest
import torch
from fake_device import fake

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def idle_device(request: pytest.FixtureRequest) -> Iterator[None]:
    call = getattr(request.node, "callspec", None)
    mode = call.params.get("mode", "lazy") if call is not None else "lazy"
    torch.accelerator.set_device_index(0)
    fake.set_mode(mode, seed=7, max_pause_us=2000)
    yield
    for device in range(2):
        torch.accelerator.synchronize(device)
