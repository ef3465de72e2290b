"""tests/unit/test_out_arrays.py on the GPU engines."""

from tests.unit.test_out_arrays import *  # noqa: F403
