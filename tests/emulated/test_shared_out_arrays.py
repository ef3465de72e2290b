"""tests/unit/test_out_arrays.py on the emulated engines."""

from tests.unit.test_out_arrays import *  # noqa: F403
