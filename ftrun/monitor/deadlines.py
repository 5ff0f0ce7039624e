"""Deadlines for a step, learned from the run's own step times.

Runs in:  agent. Pure.
Takes in: the p99 of the steps so far; the profile's `hang` section.
Gives:    durations in seconds.
Source:   the design's monitor section. NVIDIA's resiliency extension multiplies by 5, Unicron by 3.
"""

from dataclasses import dataclass

from ftrun.config.profile import HangConfig

_LOOK_AT = 0.5
_NAME_AT = 0.85


@dataclass(frozen=True, slots=True)
class HangDeadlines:
    """Deadlines for a rank without progress, in seconds since its last step boundary."""

    look_s: float
    """Stacks are sampled from here on, so that a diagnosis is ready in time."""
    suspect_s: float
    """A hang is suspected, and its culprit named."""
    act_s: float
    """A hang with positive evidence is acted on."""
    kill_s: float
    """Any hang is acted on, except as in `leave_s`."""
    leave_s: float
    """A hang is acted on even if its culprit runs a phase that may take long."""

    @staticmethod
    def of(p99_s: float, settings: HangConfig) -> "HangDeadlines":
        limit_s = max(settings.suspect_s, settings.suspect_factor * p99_s)
        kill_s = max(settings.kill_after_s, settings.kill_factor * p99_s, limit_s)
        leave_s = max(settings.phase_limit_s, kill_s)
        return HangDeadlines(_LOOK_AT * limit_s, _NAME_AT * limit_s, limit_s, kill_s, leave_s)
