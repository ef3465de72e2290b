"""tests/unit/test_kvcache_errors.py on the GPU engines."""

from tests.unit.test_kvcache_errors import *  # noqa: F403
