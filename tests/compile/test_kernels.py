"""Every kernel of the tile table compiles, without a GPU: no spills, no stack, no warnings."""

from __future__ import annotations

from itertools import product

import pytest

from cupyflash._cuda.compiler import compile_source
from cupyflash._cuda.device import Device
from cupyflash._cuda.plan import BackwardPlan, ForwardPlan, plan_backward, plan_forward
from cupyflash._cuda.score_check import check_stub
from cupyflash._cuda.score_gradients import rounding_stub
from cupyflash._cuda.score_source import ScoreSource
from cupyflash._problem import Problem

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
DTYPES = ("float16", "bfloat16", "float32", "float64")
HEAD_DIMS = (32, 64, 96, 128, 160, 192, 224, 256)

# Compiling all takes a quarter of an hour. Each dtype and head_dim is compiled for one
# architecture, each architecture for its share of them; causal and full take turns.
TABLE = [
    (ARCHS[(3 * a + b) % len(ARCHS)], dtype, head_dim, (a + b) % 2 == 0)
    for (a, dtype), (b, head_dim) in product(enumerate(DTYPES), enumerate(HEAD_DIMS))
]
HOPPER = [
    ("sm_90a", "float32", 64, False),
    ("sm_90a", "float32", 128, True),
]
ALL = TABLE + [case for case in HOPPER if case not in TABLE]


def describe(case: tuple[str, str, int, bool]) -> str:
    arch, dtype, head_dim, causal = case
    return f"{arch}-{dtype}-d{head_dim}-{'causal' if causal else 'full'}"


def problem_of(dtype: str, head_dim: int, causal: bool, **options: object) -> Problem:
    right = 0 if causal else None
    return Problem(dtype, 2, 999, 999, 4, 2, head_dim, head_dim, 0.1, None, right, **options)


def check(plan: ForwardPlan | BackwardPlan, arch: str) -> None:
    compilation = compile_source(plan.stub, arch, plan=plan)
    assert set(compilation.entries) == {launch.entry for launch in plan.launches}
    assert not compilation.warnings
    assert "warning" not in compilation.log
    for entry, usage in compilation.entries.items():
        assert (usage.stack, usage.spill_stores, usage.spill_loads) == (0, 0, 0), (entry, plan)


@pytest.mark.parametrize("case", ALL, ids=describe)
def test_forward(case: tuple[str, str, int, bool]) -> None:
    arch, dtype, head_dim, causal = case
    check(plan_forward(problem_of(dtype, head_dim, causal), Device.known(arch)), arch)


@pytest.mark.parametrize("case", ALL[::2] + HOPPER[-1:], ids=describe)
def test_backward(case: tuple[str, str, int, bool]) -> None:
    arch, dtype, head_dim, causal = case
    check(plan_backward(problem_of(dtype, head_dim, causal), Device.known(arch)), arch)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_all_features_together(dtype: str) -> None:
    problem = problem_of(
        dtype, 64, True, softcap=30.0, varlen=True, extras=frozenset({"alibi_slopes", "sinks"})
    )
    check(plan_forward(problem, Device.known("sm_90a")), "sm_90a")
    check(plan_backward(problem, Device.known("sm_80")), "sm_80")


@pytest.mark.parametrize(
    ("arch", "head_dim", "out_dtype"),
    [("sm_75", 64, "bfloat16"), ("sm_90a", 128, "float16"), ("sm_120", 256, "float32")],
)
def test_float8(arch: str, head_dim: int, out_dtype: str) -> None:
    problem = problem_of("float8_e4m3fn", head_dim, True, out_dtype=out_dtype, varlen=True)
    check(plan_forward(problem, Device.known(arch)), arch)


@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim"),
    [("sm_75", "bfloat16", 64), ("sm_90a", "float16", 128), ("sm_120", "bfloat16", 256)],
)
def test_float8_cache(arch: str, dtype: str, head_dim: int) -> None:
    problem = problem_of(dtype, head_dim, True, kv_dtype="float8_e4m3fn", varlen=True)
    check(plan_forward(problem, Device.known(arch)), arch)


MASKS = {"masks": 2, "mask_shape": (2, 1, 999, 999), "extras": frozenset({"mask", "block_mask"})}
BIAS = {"bias_dtype": "float32", "bias_shape": (1, 4, 999, 999), "extras": frozenset({"bias"})}
EVERYTHING = {
    "softcap": 30.0,
    "masks": 2,
    "mask_shape": (2, 4, 999, 999),
    "bias_dtype": "float64",
    "bias_shape": (1, 4, 1, 999),
    "dropout_p": 0.1,
    "extras": frozenset({"alibi_slopes", "bias", "block_mask", "mask", "sinks"}),
}
VARLEN = EVERYTHING | {
    "varlen": True,
    "masks": 1,
    "mask_shape": (),
    "extras": EVERYTHING["extras"] - {"block_mask"},
}


@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim", "options"),
    [
        ("sm_75", "float16", 64, BIAS),
        ("sm_80", "bfloat16", 128, {"dropout_p": 0.1}),
        ("sm_86", "float32", 32, VARLEN),
        ("sm_89", "float64", 64, EVERYTHING),
        ("sm_90a", "float32", 64, EVERYTHING),
        ("sm_90a", "float32", 256, BIAS),
        ("sm_120", "float16", 128, VARLEN),
        ("sm_100", "float32", 96, MASKS),
    ],
)
def test_changes_of_scores(
    arch: str, dtype: str, head_dim: int, options: dict[str, object]
) -> None:
    """Masks, bias and dropout, one by one and all together."""
    problem = problem_of(dtype, head_dim, True, **options)
    check(plan_forward(problem, Device.known(arch)), arch)
    check(plan_backward(problem, Device.known(arch)), arch)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_score_mod(dtype: str, deterministic: bool) -> None:
    """What a user's expression needs in registers may cost a few spills."""
    mod = ScoreSource(
        "gain[h] * score + table[j - i + 900]", None, (("gain", "float32"), ("table", "float16"))
    )
    problem = problem_of(
        dtype, 64, False, softcap=30.0, extras=frozenset({"score_mod"}), score_mod=mod
    )
    device = Device.known("sm_90a")
    for plan in (
        plan_forward(problem, device),
        plan_backward(problem, device, deterministic=deterministic),
    ):
        compilation = compile_source(plan.stub, "sm_90a", plan=plan)
        assert "warning" not in compilation.log
        assert all(usage.spill_stores <= 64 for usage in compilation.entries.values())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_kernels_beside_a_score_mod(dtype: str) -> None:
    mod = ScoreSource("score * 2", "2", ())
    for source in (rounding_stub(dtype), check_stub(mod, dtype)):
        compilation = compile_source(source, "sm_75")
        assert "warning" not in compilation.log
        assert all(usage.spill_stores == 0 for usage in compilation.entries.values())


def test_element_by_element_access() -> None:
    """An odd head_dim or an unaligned view leaves no wider access than one element."""
    problem = problem_of("float32", 33, False)
    plan = plan_forward(problem, Device.known("sm_90a"), vector_bytes=4, store_bytes=4)
    assert (plan.config.load_width, plan.config.store_width) == (1, 1)
    check(plan, "sm_90a")
