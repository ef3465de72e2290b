"""tests/unit/test_kvcache.py on the emulated engines."""

from tests.unit.test_kvcache import *  # noqa: F403
