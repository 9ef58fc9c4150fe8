"""Settings of property tests: fixed examples in a lane, fresh ones at night."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
# Compiling and training take longer than Hypothesis expects of an example.
examples = settings(
    derandomize=not NIGHTLY,
    max_examples=100 if NIGHTLY else 15,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
