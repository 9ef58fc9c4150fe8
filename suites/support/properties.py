"""Settings of property tests."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

# The same few examples in every run.
quick = settings(derandomize=True, max_examples=15, deadline=None)
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
# Fixed examples in a lane, fresh ones at night. Compiling and training take longer than Hypothesis expects of one.
examples = settings(
    derandomize=not NIGHTLY,
    max_examples=100 if NIGHTLY else 15,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
