"""tests/unit/test_errors_of_results.py on the GPU engines."""

from tests.unit.test_errors_of_results import *  # noqa: F403
