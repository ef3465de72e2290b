"""tests/cuda/test_kvcache_kernels_float8.py on the emulated engines."""

from tests.cuda.test_kvcache_kernels_float8 import *  # noqa: F403
