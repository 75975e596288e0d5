"""Settings of property tests: the same examples every time, and no time limit per example."""

from hypothesis import HealthCheck, settings

repeatable = settings(
    max_examples=200,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
