"""Captures and restores which parameters have a gradient at a step boundary.

Runs in:  worker, training thread: at each boundary, and inside `attach`.
Takes in: the parameters of the optimizers, with their names.
Gives:    the default and the names of the exceptions; after a restore, gradients of zeros.

The values are no part of a snapshot. No snapshot is taken inside an accumulation, so the script
sets gradients to zero or None before it adds to them. Their existence matters: an optimizer skips a
parameter without a gradient, and changes one with a zero gradient by momentum and decay.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch


def present_gradients(
    parameters: Iterable[torch.Tensor], names: Mapping[int, str]
) -> dict[str, Any]:
    """Whether trainable parameters usually have gradients, and the names of the exceptions.

    Args:
        parameters: of all optimizers.
        names: of parameters, by id.
    """
    have = [(parameter, _has_gradient(parameter)) for parameter in parameters]
    learned = [has for parameter, has in have if parameter.requires_grad]
    usual = sum(learned) * 2 > len(learned)
    except_ = [names[id(p)] for p, has in have if has != (usual and p.requires_grad)]
    return {"usual": usual, "except": except_}


def put_back_gradients(
    saved: Mapping[str, Any], parameters: Iterable[torch.Tensor], names: Mapping[int, str]
) -> None:
    """Set a zero gradient, in the parameter's layout, where one was saved and none is present.

    A present gradient may be a view of a DDP bucket and stays unchanged.
    """
    except_ = set(saved["except"])
    for parameter in parameters:
        usual = saved["usual"] and parameter.requires_grad
        if parameter.grad is None and usual != (names[id(parameter)] in except_):
            parameter.grad = torch.zeros_like(parameter)


def _has_gradient(parameter: torch.Tensor) -> bool:
    # Zeros cannot replace a sparse gradient, because the next backward would make it dense.
    gradient = parameter.grad
    return gradient is not None and gradient.layout is torch.strided
