"""Which tilings the mma engine refuses, and in what words."""

from __future__ import annotations

import pytest

from cupyflash._cuda.device import Device
from cupyflash._cuda.plan_mma import plan_forward
from cupyflash._cuda.plan_mma_backward import plan_backward
from cupyflash._problem import Problem
from cupyflash.errors import UnsupportedError
from cupyflash.tiling import Tiling

HOPPER = Device.known("sm_90a")


def problem_of(head_dim: int, head_dim_v: int) -> Problem:
    return Problem("float16", 2, 999, 999, 4, 2, head_dim, head_dim_v, 0.1)


@pytest.mark.parametrize(
    ("head_dims", "tiling", "limit"),
    [
        ((64, 64), Tiling(64, 32, 3, 4), "stages=2"),
        ((64, 64), Tiling(64, 32, 2, 16), "warps must be"),
        ((64, 64), Tiling(64, 16, 2, 4), "at least 32"),
        ((64, 64), Tiling(64, 40, 2, 4), "multiple of 16"),
        ((64, 64), Tiling(72, 32, 2, 4), "multiple of 64"),
        ((64, 64), Tiling(16, 32, 2, 1), "one warp cannot load"),
        ((32, 256), Tiling(16, 32, 2, 1), "one warp cannot load"),
        ((256, 256), Tiling(256, 64, 2, 4), "registers"),
        ((256, 256), Tiling(128, 128, 2, 8), "bytes of shared memory"),
    ],
)
def test_a_tiling_that_does_not_fit_is_refused_with_its_limit(
    head_dims: tuple[int, int], tiling: Tiling, limit: str
) -> None:
    with pytest.raises(UnsupportedError, match=limit):
        plan_forward(problem_of(*head_dims), HOPPER, tiling)


def test_one_warp_loads_narrow_rows() -> None:
    assert plan_forward(problem_of(32, 96), HOPPER, Tiling(16, 32, 2, 1)).config.warps == 1


def test_the_backward_leaves_a_warp_that_cannot_load_to_the_table() -> None:
    plan = plan_backward(problem_of(64, 64), HOPPER, Tiling(32, 32, 2, 1))
    assert plan == plan_backward(problem_of(64, 64), HOPPER)
