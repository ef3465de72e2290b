"""tests/unit/test_metamorphic.py on the GPU engines: conftest.py here gives another `engine`."""

from tests.unit.test_metamorphic import *  # noqa: F403
