"""Shared by the manually sharded trainings: the sum over the ranks of a row."""

from typing import Any

import torch
import torch.distributed as dist


class Sum(torch.autograd.Function):
    """Sums the parts of a row in the forward pass, or in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, forth: bool, row: "dist.ProcessGroup | None"
    ) -> torch.Tensor:
        ctx.forth, ctx.row = forth, row
        x = x.clone()
        if forth:
            dist.all_reduce(x, group=row)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        gradient = gradient.clone()
        if not ctx.forth:
            dist.all_reduce(gradient, group=ctx.row)
        return gradient, None, None
