"""Whether this machine has a GPU that CuPy can use."""

from __future__ import annotations

import importlib.util

import pytest


def has_gpu() -> bool:
    if importlib.util.find_spec("cupy") is None:
        return False
    import cupy

    return bool(cupy.cuda.is_available())


ON_GPU = (pytest.mark.cuda, pytest.mark.skipif(not has_gpu(), reason="no GPU"))
