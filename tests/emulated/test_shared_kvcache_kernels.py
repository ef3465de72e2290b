"""tests/cuda/test_kvcache_kernels.py on the emulated engines."""

from tests.cuda.test_kvcache_kernels import *  # noqa: F403
