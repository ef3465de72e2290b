"""tests/unit/test_kvcache_float8.py on the emulated engines."""

from tests.unit.test_kvcache_float8 import *  # noqa: F403
from tests.unit.test_kvcache_float8 import _served  # noqa: F401
