"""tests/unit/test_float8.py on the emulated engines."""

from tests.unit.test_float8 import *  # noqa: F403
