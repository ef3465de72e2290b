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


def takes_turns(device: Device = HOPPER, **options: object) -> bool:
    """Whether a call of head dim 128 takes turns, (4, 4096, 16, 128) but for `options`."""
    sizes: dict[str, object] = {"batch": 4, "seqlen_q": 4096, "seqlen_k": 4096, "num_heads": 16}
    sizes |= {"num_heads_kv": 16, "head_dim": 128, "head_dim_v": 128, "softmax_scale": 0.1}
    return plan_forward(Problem("float16", **sizes | options), device).config.turns  # type: ignore[arg-type]


def test_long_calls_whose_scores_take_time_multiply_in_turns() -> None:
    capped = {"softcap": 30.0}
    assert takes_turns(**capped)
    assert takes_turns(dropout_p=0.1)
    assert takes_turns(head_dim=256)
    assert takes_turns(head_dim=256, seqlen_q=512, seqlen_k=512)
    assert not takes_turns(head_dim=256, seqlen_q=512, seqlen_k=512, window_right=0)
    assert not takes_turns()
    assert not takes_turns(**capped, seqlen_k=256)
    assert not takes_turns(**capped, seqlen_q=1)
    assert not takes_turns(**capped, window_left=100, window_right=100)
    assert not takes_turns(**capped, window_right=0, seqlen_q=1024)
    assert not takes_turns(**capped, batch=1, num_heads=1, num_heads_kv=1)
    assert not takes_turns(**capped, batch=64, varlen=True)  # 64 tokens each
    assert not takes_turns(Device.known("sm_80"), **capped)
    mask = {"masks": 1, "extras": frozenset({"mask"})}
    assert takes_turns(**mask, mask_shape=(4, 1, 1, 4096))
    assert not takes_turns(**mask, mask_shape=(1, 1, 4096, 4096))
    blocks = frozenset({"block_mask"})
    assert not takes_turns(extras=blocks, mask_shape=(1, 1, 4096, 4096))
    bias = {"bias_dtype": "float16", "bias_shape": (1, 16, 4096, 4096)}
    assert not takes_turns(**capped, **bias, extras=frozenset({"bias"}))


def test_turns_may_be_asked_for() -> None:
    problem, tiling = problem_of(128, 64), Tiling(256, 32, 2, 8)
    assert plan_forward(problem, HOPPER, tiling).config.turns
    assert plan_forward(problem, Device.known("sm_80"), tiling).config.turns
