"""tests/unit/test_features.py on the GPU engines: conftest.py here gives another `engine`."""

from tests.unit.test_features import *  # noqa: F403
