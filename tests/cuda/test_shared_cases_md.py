"""tests/unit/test_cases_md.py on the GPU engines."""

from tests.unit.test_cases_md import *  # noqa: F403
