"""For all tests: no property has a limit of time, since machines are as busy as they are."""

from hypothesis import HealthCheck, settings

settings.register_profile("ftrun", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ftrun")
