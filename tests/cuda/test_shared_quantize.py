"""tests/unit/test_quantize.py on the GPU engines, for CuPy arrays."""

from tests.unit.test_quantize import *  # noqa: F403
