"""Fixtures of every test: a fresh random generator and the engine under test."""

from __future__ import annotations

import os
import secrets
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("tests.harness", "tests.memory", "tests.tolerance")

settings.register_profile(
    "cupyflash",
    deadline=None,  # the first call of a kernel compiles it
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("cupyflash")


@pytest.fixture(scope="session", params=["numpy"])
def engine(request: Any) -> str:
    """The engine under test. tests/cuda/conftest.py puts the GPU engines in its place."""
    return request.param


@pytest.fixture
def rng(request: Any) -> np.random.Generator:
    """Fresh numbers in every run; ``CUPYFLASH_TEST_SEED`` repeats one."""
    seed = int(os.environ.get("CUPYFLASH_TEST_SEED") or secrets.randbits(32))
    request.node.add_report_section("setup", "seed", f"repeat with CUPYFLASH_TEST_SEED={seed}")
    return np.random.default_rng(seed)
