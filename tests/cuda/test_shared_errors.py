"""tests/unit/test_errors.py on the GPU engines."""

from tests.unit.test_errors import *  # noqa: F403
