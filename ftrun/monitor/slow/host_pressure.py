"""Pressure on a node: the time in which its tasks waited for a processor, memory or a disk.

Source: the kernel's pressure stall information (Documentation/accounting/psi.rst).
"""

import msgspec

SHOWN_PERCENT = 10.0
"""Less is usual on a node that is used."""


class HostPressure(msgspec.Struct, frozen=True):
    """Percent of the last 10 s in which at least one task waited; None: not known.

    Of the agent's cgroup, or of the machine if the cgroup's cannot be read.
    """

    cpu: float | None = None
    memory: float | None = None
    io: float | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """One text for each resource that tasks waited for."""
        of = ((self.cpu, "a processor"), (self.memory, "memory"), (self.io, "a disk"))
        return tuple(
            f"tasks waited for {what} in {percent:.0f} % of the last 10 s (PSI)"
            for percent, what in of
            if percent is not None and percent >= SHOWN_PERCENT
        )
