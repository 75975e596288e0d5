"""How property tests run: the same examples every time, no time limit per example on a shared machine."""

from hypothesis import HealthCheck, settings

repeatable = settings(
    max_examples=200,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
