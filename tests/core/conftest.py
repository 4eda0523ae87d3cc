"""Property tests look for faults, not for slowness: no deadline, and few enough examples for two cores."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("core", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("core")
