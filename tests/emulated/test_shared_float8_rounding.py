"""tests/unit/test_float8_rounding.py on the emulated engines."""

from tests.unit.test_float8_rounding import *  # noqa: F403
