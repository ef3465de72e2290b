"""Order-independent sums of kernels/attention/exact_sum.cuh, compiled for the host."""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from cupyflash._cuda.source import kernels_root

COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

# What CUDA has built in; then numbers from standard input, their sum to standard output.
PROGRAM = """
#include <math.h>
#include <stdio.h>
#define __device__
inline void atomicAdd(unsigned long long* to, unsigned long long value) { *to += value; }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline long long __double_as_longlong(double x) { return __builtin_bit_cast(long long, x); }
struct { int x; } blockIdx, blockDim, threadIdx;
#include "attention/exact_sum.cuh"
int main() {
  unsigned long long words[cupyflash::ExactSum<TYPE>::words] = {};
  const cupyflash::ExactSum<TYPE> sum{words};
  double value;
  while (scanf("%la", &value) == 1) sum.add(TYPE(value));
  printf("%a", double(sum.rounded()));
}
"""


@pytest.fixture(scope="module", params=["float32", "float64"])
def summing(request, tmp_path_factory):
    """The dtype, and a function from numbers to their sum."""
    folder: Path = tmp_path_factory.mktemp("exact")
    cxx_type = {"float32": "float", "float64": "double"}[request.param]
    (folder / "program.cpp").write_text(PROGRAM)
    command = [COMPILER, "-std=c++20", f"-DTYPE={cxx_type}", f"-I{kernels_root()}"]
    subprocess.run([*command, "-o", "program", "program.cpp"], cwd=folder, check=True)

    def total(values) -> float:
        text = "\n".join(float(value).hex() for value in values)
        done = subprocess.run(
            [folder / "program"], input=text, capture_output=True, text=True, check=True
        )
        return float.fromhex(done.stdout) if "n" not in done.stdout else math.nan

    return np.dtype(request.param), total


def assert_exact(dtype, total, values):
    expected = math.fsum(map(float, values))
    unit = np.finfo(dtype).eps * abs(expected) + float(np.finfo(dtype).smallest_subnormal)
    assert abs(total(values) - expected) <= unit


@pytest.mark.parametrize("spread", [1, 20, 100])
def test_sums_of_any_order_and_size(rng, summing, spread):
    dtype, total = summing
    values = (rng.normal(size=999) * np.exp2(rng.integers(-spread, spread, 999))).astype(dtype)
    assert_exact(dtype, total, values)
    assert total(values) == total(rng.permutation(values))


def test_cancellation_leaves_the_small_parts(rng, summing):
    dtype, total = summing
    large = (rng.normal(size=200) * np.exp2(rng.integers(60, 100, 200))).astype(dtype)
    small = (rng.normal(size=7) * np.exp2(-90.0)).astype(dtype)
    values = rng.permutation(np.concatenate([large, small, -large]))
    assert_exact(dtype, total, values)


def test_the_whole_range(summing):
    dtype, total = summing
    limits = np.finfo(dtype)
    tiny = limits.smallest_subnormal
    for values in ([], [tiny], [-tiny] * 5, [limits.max], [limits.max, -limits.max, tiny],
                   [-limits.max / 4, limits.tiny], [0.0, -0.0]):  # fmt: skip
        assert total(values) == math.fsum(map(float, values))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows(summing, bad):
    assert math.isnan(summing[1]([1.0, bad, 2.0]))
