"""Whether the parameters are still numbers, for next to nothing.

Runs in:  worker, after each optimizer step.
Takes in: the optimizer that has just stepped.
Gives:    the first step after which a parameter was not finite, on the heartbeat page.

One number of one parameter is looked at after each step, another parameter each time: what is
not a number spreads to all of them within a step or two. Only on the processor: on a device a
look would wait for it, and there the loss tells.
"""

import math
from contextlib import suppress
from typing import Any

from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage

_turn = 0


def check(optimizer: Any, page: SharedPage, step: int) -> None:
    """Look at one number.

    Args:
        optimizer: a torch optimizer.
        page: where the first bad step is noted.
        step: the one that has just been made, from 1.
    """
    global _turn
    if page.get(HeartbeatField.BAD_NUMBERS_STEP):
        return
    _turn += 1
    groups = optimizer.param_groups
    parameters = groups[_turn % len(groups)]["params"] if groups else ()
    if not parameters:
        return
    parameter = parameters[_turn % len(parameters)]
    local = getattr(parameter, "_local_tensor", parameter).detach()
    if local.device.type != "cpu" or not local.numel() or not local.is_floating_point():
        return
    with suppress(RuntimeError, NotImplementedError):  # sparse, quantised: nothing is looked at
        if not math.isfinite(local[(0,) * local.dim()].item()):
            page.set(HeartbeatField.BAD_NUMBERS_STEP, step)
