"""tests/unit/test_arrays.py on the GPU engines."""

from tests.unit.test_arrays import *  # noqa: F403
