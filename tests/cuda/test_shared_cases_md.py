"""tests/unit/test_cases_md.py on the GPU engines: conftest.py here gives another `engine`."""

from tests.unit.test_cases_md import *  # noqa: F403
