"""tests/unit/test_float8.py on the GPU engines."""

from tests.unit.test_float8 import *  # noqa: F403
