"""tests/unit/test_deterministic.py on the emulated engines."""

from tests.unit.test_deterministic import *  # noqa: F403
