"""tests/unit/test_kvcache.py on the GPU engines."""

from tests.unit.test_kvcache import *  # noqa: F403
