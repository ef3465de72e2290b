"""tests/unit/test_features.py on the emulated engines."""

from tests.unit.test_features import *  # noqa: F403
