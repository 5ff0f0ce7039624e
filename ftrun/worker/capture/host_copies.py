"""Asynchronous copies of small tensors to the host.

Runs in: worker, training thread; also under plain python.
"""

import torch


class HostCopy:
    """Copy of one tensor in host memory; shares the memory of a CPU tensor."""

    def __init__(self, source: torch.Tensor) -> None:
        # torch allocates a pinned target for this copy from CUDA, so the copy is asynchronous.
        self.tensor = source.detach().to("cpu", non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if source.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(source.device))

    @property
    def has_arrived(self) -> bool:
        """Whether the copy is complete; until then the content of `tensor` is undefined."""
        return self._event is None or self._event.query()  # type: ignore[no-untyped-call]
