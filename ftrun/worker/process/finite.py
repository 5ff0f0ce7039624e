"""Detects NaN and infinite parameters at negligible cost.

Runs in:  worker, after each optimizer step.
Takes in: the optimizer that has just stepped.
Gives:    the first step after which a parameter was not finite, on the heartbeat page.

After each step, one element of one parameter is read, of another parameter each time. A NaN
spreads to all parameters within one or two steps, so one element is enough. Only parameters on the
CPU are read, because a read from a device would wait for it. On a device, the loss shows the NaN.
"""

import math
from contextlib import suppress
from typing import Any

from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage

_turn = 0


def check(optimizer: Any, page: SharedPage, step: int) -> None:
    """Check one element, and write the first bad step to the page.

    Args:
        optimizer: a torch optimizer.
        page: the heartbeat page.
        step: the step that has just ended; counts from 1.
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
    with suppress(RuntimeError, NotImplementedError):  # sparse and quantised ones are not checked
        if not math.isfinite(local[(0,) * local.dim()].item()):
            page.set(HeartbeatField.BAD_NUMBERS_STEP, step)
