"""The kernels of a key-value cache compile, without a GPU: no warnings, nothing spilled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cupyflash._cuda.compiler import compile_source
from cupyflash._cuda.device import Device
from cupyflash._cuda.plan_decode import CacheProblem, Splits, plan_append, plan_decode
from cupyflash._problem import Problem

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
# Queries, query heads, head_dim: one tile of 16 rows, of 32, of 64.
SHAPES = (
    (1, 8, 64),
    (1, 8, 128),
    (1, 8, 256),
    (6, 8, 128),
    (6, 8, 256),
    (40, 8, 128),
    (40, 8, 256),
)
CASES = [(ARCHS[index % len(ARCHS)], *shape) for index, shape in enumerate(SHAPES)]
CASES += [("sm_90a", 1, 8, 192), ("sm_90a", 40, 8, 256), ("sm_80", 1, 8, 128)]
CASES += [(arch, 1, 8, 128) for arch in ARCHS[2:]]
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_left": 100, "window_right": 0},
    "softcap": {"softcap": 30.0},
    "exact softcap": {"softcap": 100.0, "window_right": 0},
    "alibi and sinks": {"extras": frozenset({"alibi_slopes", "sinks"})},
}


FLOAT8 = "float8_e4m3fn"


def problem_of(
    seqlen_q: int, heads: int, head_dim: int, page_size: int = 0, **options: Any
) -> CacheProblem:
    dtype = "bfloat16" if heads % 3 else "float16"
    attention = Problem(dtype, 3, seqlen_q, 4096, heads, 2, head_dim, head_dim, 0.1, **options)
    return CacheProblem(attention, page_size, new_tokens=1)


def check(plan: Any, arch: str) -> None:
    compilation = compile_source(plan.stub, arch, plan=plan)
    assert set(compilation.entries) == {launch.entry for launch in plan.launches}
    assert not compilation.warnings
    assert "warning" not in compilation.log
    for entry, usage in compilation.entries.items():
        assert usage.spill_stores == 0, (entry, plan)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_shape_of_a_block(case: tuple[str, int, int, int]) -> None:
    arch, *shape = case
    problem = problem_of(*shape, page_size=16, window_right=0)
    check(plan_decode(problem, Device.known(arch), Splits(4)), arch)


@pytest.mark.parametrize(
    ("change", "page_size"), list(zip(CHANGES, (0, 1, 7, 256, 16), strict=True))
)
def test_changes_of_scores(change: str, page_size: int) -> None:
    problem = problem_of(1, 6, 128, page_size, **CHANGES[change])
    splits = Splits(1) if page_size else Splits(3, 2048)
    check(plan_decode(problem, Device.known("sm_90a"), splits), "sm_90a")


def test_single_elements() -> None:
    """Strides that no vector load can follow."""
    problem = problem_of(1, 8, 59, softcap=3.0, extras=frozenset({"alibi_slopes", "sinks"}))
    check(plan_decode(problem, Device.known("sm_80"), Splits(2), 2), "sm_80")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float8_cache(case: tuple[str, int, int, int]) -> None:
    arch, *shape = case
    problem = problem_of(*shape, page_size=16, window_right=0, kv_dtype=FLOAT8)
    check(plan_decode(problem, Device.known(arch), Splits(4)), arch)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("arch", ["sm_86", "sm_90a"])
def test_changes_of_scores_of_a_float8_cache(arch: str, change: str) -> None:
    problem = problem_of(1, 6, 128, kv_dtype=FLOAT8, **CHANGES[change])
    problem = replace(problem, key_factors=change == "plain")
    check(plan_decode(problem, Device.known(arch), Splits(1)), arch)


def test_single_bytes() -> None:
    problem = problem_of(1, 8, 59, kv_dtype=FLOAT8)
    check(plan_decode(problem, Device.known("sm_90a"), Splits(2), 1), "sm_90a")


@pytest.mark.parametrize(
    ("arch", "rotary", "vector_bytes"),
    [
        ("sm_80", "float32", 16),
        ("sm_90a", None, 16),
        ("sm_100", None, 2),
        ("sm_120", "bfloat16", 2),
    ],
)
def test_append(arch: str, rotary: str | None, vector_bytes: int) -> None:
    attention = problem_of(2, 8, 128).attention
    problem = CacheProblem(
        attention, 16 * (rotary is None), 2, rotary_dtype=rotary, interleaved=rotary == "float32"
    )
    check(plan_append(problem, vector_bytes), arch)
    cached_as_float8 = replace(attention, kv_dtype=FLOAT8)
    problem = replace(problem, attention=cached_as_float8, new_dtype=attention.dtype)
    check(plan_append(problem, vector_bytes), arch)
