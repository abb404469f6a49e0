"""Settings of all tests."""

import os

from hypothesis import HealthCheck, settings

# How long an example takes says something about the machine, not about the code. Examples are the same in every run, so
# that a change is judged and not luck; `make explore` looks for others.
settings.register_profile(
    "prism",
    deadline=None,
    derandomize=not os.environ.get("PRISM_EXPLORE"),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("prism")
