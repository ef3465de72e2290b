"""Dual numbers of kernels/attention/dual.cuh, compiled for the host: derivatives by differences."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from cupyflash._cuda.source import kernels_root

COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

# Over x in (0, 1); each must be smooth near the points at which it is evaluated.
EXPRESSIONS = [
    "x + 2", "2 - x", "-x * x", "3 * x * x / (1 + x)", "1.5f / x", "x / 3", "+x - 0.25",
    "exp(x)", "expf(-x)", "exp2(x)", "exp2f(x)", "expm1(x)", "expm1f(x)", "log(x)", "logf(x)",
    "log2(x)", "log2f(x)", "log1p(x)", "log1pf(x)", "sqrt(x)", "sqrtf(x)", "rsqrt(x)", "rsqrtf(x)",
    "tanh(x)", "tanhf(2 * x)", "sin(x)", "sinf(x)", "cos(x)", "cosf(x)", "erf(x)", "erff(x)",
    "pow(x, 3)", "powf(2, x)", "pow(x, x)", "fma(x, x, 1)", "fmaf(2, x, x)", "__expf(x)",
    "__logf(x)", "fabs(x - 2)", "fabsf(x)", "abs(-x)", "min(x, 5)", "fminf(x * x, 9)",
    "max(x, 0.0f)", "fmaxf(x, 7)", "fmin(2, x)", "fmax(x, 0)", "floor(x) + x", "ceilf(x) * x",
    "x > 0 ? x * x : 1.0f", "x < 0 ? 2 : x", "(x == 0.5f) + x", "int(4 * x) * x", "x ? x : 1",
]  # fmt: skip

# What CUDA has built in, and then a line "plain value, value, slope, difference quotient" for each
# expression and point.
PROGRAM = """
#include <math.h>
#include <stdio.h>
#define __device__
inline double rsqrt(double x) { return 1 / sqrt(x); }
inline double rsqrtf(double x) { return rsqrt(x); }
inline double __expf(double x) { return exp(x); }
inline double __logf(double x) { return log(x); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
#include "attention/dual.cuh"
using Dual = cupyflash::Dual<double>;

template <class Function>
void print(Function f) {
  const double step = 1e-5;
  const double points[] = {0.15, 0.4, 0.9};
  for (double x : points) {
    const Dual result = f(Dual(x, 1.0));
    const Dual up = f(Dual(x + step)), down = f(Dual(x - step));
    printf("%.9g %.9g %.9g %.9g\\n", double(f(x)), result.value, result.slope,
           (up.value - down.value) / (2 * step));
  }
}
int main() {
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    folder = tmp_path_factory.mktemp("dual")
    calls = (f"  print([](auto x) {{ return {expression}; }});" for expression in EXPRESSIONS)
    (folder / "program.cpp").write_text(PROGRAM + "\n".join(calls) + "\n}\n")
    command = [COMPILER, "-std=c++20", f"-I{kernels_root()}", "-o", "program", "program.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    text = subprocess.run([folder / "program"], capture_output=True, text=True, check=True).stdout
    return [[float(number) for number in line.split()] for line in text.splitlines()]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_value_and_slope(expression: str, printed: list[list[float]]) -> None:
    first = 3 * EXPRESSIONS.index(expression)
    for plain, value, slope, quotient in printed[first : first + 3]:
        assert value == pytest.approx(plain, rel=1e-6)
        assert slope == pytest.approx(quotient, rel=1e-5, abs=1e-6)


def test_a_slope_of_0_stays_0(tmp_path: Path) -> None:
    """What does not depend on the variable has no slope, be its derivative infinite."""
    expressions = ("sqrt(0 * x)", "pow(0 * x - 1, 2.0)", "log(x - x)", "1 / (x - x) * 0")
    prints = (f'printf("%g\\n", ({e}).slope);' for e in expressions)
    source = PROGRAM + "const Dual x(0.5);" + "".join(prints) + "}"
    (tmp_path / "program.cpp").write_text(source)
    command = [COMPILER, "-std=c++20", f"-I{kernels_root()}", "-o", "program", "program.cpp"]
    subprocess.run(command, cwd=tmp_path, check=True)
    text = subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=True).stdout
    assert text.split() == ["0"] * len(expressions)


@pytest.mark.parametrize("expression", ["float(x)", "double(x)", "(long)x", "fmodf(x, 2)"])
def test_no_slope_is_lost_without_a_word(expression: str, tmp_path: Path) -> None:
    source = PROGRAM + f"const Dual x(0.5, 1); auto y = {expression}; (void)y; }}"
    (tmp_path / "program.cpp").write_text(source)
    command = [COMPILER, "-std=c++20", f"-I{kernels_root()}", "-fsyntax-only", "program.cpp"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode != 0
