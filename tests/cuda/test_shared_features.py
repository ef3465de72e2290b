"""tests/unit/test_features.py on the GPU engines."""

from tests.unit.test_features import *  # noqa: F403
