"""Settings of the property tests: the same examples every time, unless BCQ_EXPLORE asks for others."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from weights.strategies import EXPLORE

settings.register_profile(
    "fuzz",
    derandomize=EXPLORE == 1,
    database=None,
    deadline=None,
    max_examples=100 * EXPLORE,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
settings.load_profile("fuzz")
