"""tests/unit/test_arrays.py on the GPU engines: conftest.py here gives another `engine`."""

from tests.unit.test_arrays import *  # noqa: F403
