"""How long a step may take before something is done about it: learnt from the run's own steps.

Runs in:  agent. Pure.
Takes in: the p99 of the steps so far; the profile's `hang` section.
Gives:    three durations in seconds.
Source:   the design's monitor section. NVIDIA's resiliency extension multiplies by 5, Unicron by 3.
"""

from dataclasses import dataclass

_LOOK_AT = 0.5
_NAME_AT = 0.85


@dataclass(frozen=True, slots=True)
class HangSettings:
    """The profile's `hang` section; config.py says what each means."""

    suspect_s: float = 10.0
    suspect_factor: float = 3.0
    kill_after_s: float = 120.0
    kill_factor: float = 10.0
    phase_limit_s: float = 1800.0
    still_s: float = 3.0
    action: str = "restart"


@dataclass(frozen=True, slots=True)
class HangDeadlines:
    """Of a rank's silence, in seconds since its last step boundary."""

    look_s: float
    """From here on stacks are taken, so that a finding is ready in time."""
    suspect_s: float
    """A hang is suspected, and its culprit named."""
    act_s: float
    """It is acted on where the evidence is positive."""
    kill_s: float
    """It is acted on."""
    leave_s: float
    """It is acted on where the culprit does what may take long."""

    @staticmethod
    def of(p99_s: float, settings: HangSettings) -> "HangDeadlines":
        """For a run whose steps take so long."""
        limit_s = max(settings.suspect_s, settings.suspect_factor * p99_s)
        kill_s = max(settings.kill_after_s, settings.kill_factor * p99_s, limit_s)
        leave_s = max(settings.phase_limit_s, kill_s)
        return HangDeadlines(_LOOK_AT * limit_s, _NAME_AT * limit_s, limit_s, kill_s, leave_s)
