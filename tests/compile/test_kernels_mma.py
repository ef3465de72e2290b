"""The mma engine's kernels compile, without a GPU: no warnings, no spills that would cost time."""

from __future__ import annotations

import pytest

from cupyflash._cuda.compiler import compile_source
from cupyflash._cuda.device import Device
from cupyflash._cuda.plan_mma import MmaForwardPlan, plan_forward
from cupyflash._cuda.plan_mma_backward import MmaBackwardPlan, plan_backward
from cupyflash._cuda.score_source import ScoreSource
from cupyflash._problem import Problem
from cupyflash.errors import UnsupportedError
from cupyflash.tiling import Tiling

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
HEAD_DIMS = (32, 64, 96, 128, 160, 192, 224, 256)
CASES = [
    (ARCHS[index % len(ARCHS)], head_dim, index % 3 == 0)
    for index, head_dim in enumerate(HEAD_DIMS)
] + [("sm_90a", 64, False), ("sm_90a", 128, True), ("sm_90a", 256, False)]

BIAS = {"bias_dtype": "float16", "bias_shape": (2, 4, 999, 999), "extras": frozenset({"bias"})}
WHOLE_BIAS = BIAS | {"bias_shape": (1, 4, 999, 999)}
SHARED_BIAS = BIAS | {"bias_dtype": "float32", "bias_shape": (1, 4, 1, 999)}
MASK = {"masks": 1, "mask_shape": (2, 1, 1, 999), "extras": frozenset({"mask"})}
BLOCKS = {"mask_shape": (1, 4, 999, 999), "extras": frozenset({"block_mask"})}
DROPOUT = {"dropout_p": 0.1}
ALIBI = {"extras": frozenset({"alibi_slopes"})}
FEATURES: list[tuple[str, int, dict[str, object]]] = [
    ("sm_80", 128, DROPOUT),
    ("sm_86", 64, MASK),
    ("sm_89", 64, BIAS),
    ("sm_90a", 128, BIAS),
    ("sm_90a", 128, WHOLE_BIAS),
    ("sm_90a", 128, ALIBI),
    ("sm_90a", 128, {"softcap": 30.0}),
    ("sm_90a", 256, {"softcap": 30.0}),
    ("sm_100", 128, BLOCKS),
    ("sm_120", 64, SHARED_BIAS),
]
EVERYTHING = {
    "softcap": 100.0,
    "masks": 2,
    "mask_shape": (2, 4, 999, 999),
    "bias_dtype": "float64",
    "bias_shape": (1, 4, 999, 999),
    "dropout_p": 0.1,
    "extras": frozenset({"alibi_slopes", "bias", "block_mask", "mask", "sinks"}),
}

# Values that a block needs outside its inner loop alone, where all 255 registers are in use.
MOST_SPILLED_BYTES = 48
MOST_SPILLED_BYTES_WITH_FEATURES = 112


def problem_of(head_dim: int, causal: bool, **options: object) -> Problem:
    dtype = "float16" if causal else "bfloat16"
    right = 0 if causal else None
    return Problem(dtype, 2, 999, 999, 4, 2, head_dim, head_dim, 0.1, None, right, **options)


def check(plan: MmaForwardPlan | MmaBackwardPlan, arch: str, spilled: int) -> None:
    compilation = compile_source(plan.stub, arch, plan=plan)
    assert set(compilation.entries) == {launch.entry for launch in plan.launches}
    assert not compilation.warnings
    assert "warning" not in compilation.log
    for entry, usage in compilation.entries.items():
        assert usage.spill_stores <= spilled, (entry, plan)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tile_table(case: tuple[str, int, bool]) -> None:
    arch, head_dim, causal = case
    problem, device = problem_of(head_dim, causal), Device.known(arch)
    check(plan_forward(problem, device), arch, MOST_SPILLED_BYTES)
    check(plan_backward(problem, device), arch, MOST_SPILLED_BYTES)


def test_every_feature() -> None:
    extras = frozenset({"alibi_slopes", "sinks"})
    problem = problem_of(64, True, varlen=True, softcap=3.0, extras=extras)
    device = Device.known("sm_90a")
    check(plan_forward(problem, device, None, 2, 2), "sm_90a", 256)
    check(plan_backward(problem, device, None, 2, 2, True), "sm_90a", 256)


@pytest.mark.parametrize(("arch", "head_dim", "options"), FEATURES, ids=str)
def test_one_feature(arch: str, head_dim: int, options: dict[str, object]) -> None:
    problem, device = problem_of(head_dim, False, **options), Device.known(arch)
    check(plan_forward(problem, device), arch, MOST_SPILLED_BYTES_WITH_FEATURES)
    check(plan_backward(problem, device), arch, MOST_SPILLED_BYTES_WITH_FEATURES)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_score_mod(head_dim: int) -> None:
    """The scores before the change are kept, where registers are scarce."""
    arrays = (("gain", "float32"), ("table", "bfloat16"))
    mod = ScoreSource("gain[h] * score + table[j - i + 900]", None, arrays)
    extras = frozenset({"score_mod"})
    problem = problem_of(head_dim, False, extras=extras, score_mod=mod)
    device = Device.known("sm_90a")
    check(plan_forward(problem, device), "sm_90a", 256)
    check(plan_backward(problem, device), "sm_90a", 256)


def test_masks_bias_and_dropout_together() -> None:
    problem, device = problem_of(32, True, **EVERYTHING), Device.known("sm_90a")
    check(plan_forward(problem, device, None, 2, 2, 2), "sm_90a", 512)
    check(plan_backward(problem, device, None, 2, 2, True, 2), "sm_90a", 1024)


def test_refusals() -> None:
    problem = problem_of(64, True)
    with pytest.raises(UnsupportedError, match="compute capability"):
        plan_forward(problem, Device.known("sm_75"))
    with pytest.raises(UnsupportedError, match="float16 and bfloat16"):
        plan_forward(Problem("float32", 1, 9, 9, 1, 1, 64, 64, 0.1), Device.known("sm_80"))


@pytest.mark.parametrize("plan_of", [plan_forward, plan_backward])
def test_a_tiling_is_refused_or_compiles(rng, plan_of) -> None:
    """Of all sizes, four that are not refused."""
    compiled = 0
    while compiled < 4:
        head_dim, block_m, block_n = (16 * int(rng.integers(1, n + 1)) for n in (16, 8, 8))
        tiling = Tiling(block_m, block_n, 2, int(rng.choice([1, 2, 4, 8])))
        try:
            plan = plan_of(problem_of(head_dim, False), Device.known("sm_90a"), tiling)
        except UnsupportedError:
            continue
        if plan.tiling == tiling:
            compile_source(plan.stub, "sm_90a", plan=plan)
            compiled += 1


def test_a_tile_with_more_queries_than_columns_for_each_warp() -> None:
    """One warp then has all columns of dQ, though there are fewer than rows."""
    tiling = Tiling(128, 16, 2, 2)
    plan = plan_backward(problem_of(32, False), Device.known("sm_90a"), tiling)
    assert plan.tiling == tiling
    compile_source(plan.stub, "sm_90a", plan=plan)
