"""tests/unit/test_errors.py on the GPU engines: conftest.py here gives another `engine`."""

from tests.unit.test_errors import *  # noqa: F403
