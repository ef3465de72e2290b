"""tests/unit/test_metamorphic.py on the emulated engines."""

from tests.unit.test_metamorphic import *  # noqa: F403
