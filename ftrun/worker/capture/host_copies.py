"""Copies of small tensors to the host that the training thread does not wait for.

Runs in:  worker, training thread; also under plain python.
Takes in: a tensor on any device.
Gives:    its values on the host, and whether they have arrived.
"""

import torch


class HostCopy:
    """One tensor on its way; of a CPU tensor the tensor itself."""

    def __init__(self, source: torch.Tensor) -> None:
        # torch pins the target of a copy from CUDA: only then is it asynchronous.
        self.tensor = source.detach().to("cpu", non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if source.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(source.device))

    @property
    def has_arrived(self) -> bool:
        """Before this is true, `tensor` holds what was in that memory earlier."""
        return self._event is None or self._event.query()  # type: ignore[no-untyped-call]
