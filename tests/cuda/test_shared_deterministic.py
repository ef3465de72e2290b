"""tests/unit/test_deterministic.py on the GPU engines."""

from tests.unit.test_deterministic import *  # noqa: F403
