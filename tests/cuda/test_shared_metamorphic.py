"""tests/unit/test_metamorphic.py on the GPU engines."""

from tests.unit.test_metamorphic import *  # noqa: F403
