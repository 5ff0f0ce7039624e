"""The state of a GradScaler on a device.

Its `state_dict()` reads two tensors of the device, so the training thread would wait at each
boundary until the device gets there. A snapshot copies the tensors in place of their values.
"""

from typing import Any

import torch


def scaler_state(thing: Any) -> dict[str, Any]:
    """Like `state_dict()`, with tensors in place of the values that are on a device."""
    kind = torch.amp.GradScaler
    if type(thing).state_dict is kind.state_dict and thing.is_enabled():
        scale, tracker = thing._scale, thing._growth_tracker
        if scale is not None and not scale.is_cpu:
            return {
                "scale": scale,
                "growth_factor": thing.get_growth_factor(),
                "backoff_factor": thing.get_backoff_factor(),
                "growth_interval": thing.get_growth_interval(),
                "_growth_tracker": tracker,
            }
    found: dict[str, Any] = thing.state_dict()
    return found


def loadable(thing: Any, saved: Any) -> Any:
    """The saved state as the `load_state_dict()` of this object takes it."""
    if not isinstance(thing, torch.amp.GradScaler) or not isinstance(saved, dict):
        return saved
    return {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in saved.items()}
