"""The stand-in for CuPy: calls compile what they would on a GPU, and real faults are told apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash.errors import CompileError
from tests.compile_ahead.__main__ import ROOT, main
from tests.compile_ahead.plugin import is_finding

CALLS = """\
import cupyflash
from tests.compile_ahead import stand_in

stand_in.install()
import cupy.lib.stride_tricks  # its own, not NumPy's

as_strided = cupy.lib.stride_tricks.as_strided
assert isinstance(as_strided(cupy.zeros(3), (2, 2), (8, 8)), cupy.ndarray)

for engine in ("simt", "mma"):
    q = cupy.zeros((1, 16, 1, 16), "float16")
    out = cupyflash.flash_attention(q, q, q, engine=engine)
    again = cupyflash.flash_attention(q, q, q, engine=engine)  # without planning
    assert isinstance(again, cupy.ndarray) and out.shape == again.shape == q.shape
"""


def test_calls_compile_and_launch_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"CUPYFLASH_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", CALLS], cwd=ROOT, env=environment, check=True)
    assert len(list(tmp_path.glob("*.cubin"))) == 2


def test_the_command_skips_what_it_cannot_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", "")  # put back afterwards
    test = "tests/cuda/test_matrix.py::test_length_one[simt-float16-(1, 1)]"
    assert main(["--cache", str(tmp_path), test, "-p", "no:cacheprovider"]) == 0
    kernels = len(list(tmp_path.glob("*.cubin")))
    printed = capfd.readouterr().out
    assert kernels > 1 and f"{kernels} kernels" in printed
    assert "1 skipped" in printed


def raised(function: Any, *arguments: Any) -> BaseException:
    with pytest.raises(TypeError) as info:
        function(*arguments)
    return info.value


def test_findings() -> None:
    q = np.zeros((1, 2, 1, 8), np.float32)
    inside, outside = raised(cupyflash.flash_attention, q, q, 5), raised(np.zeros, "shape")
    assert is_finding(inside) and not is_finding(outside)
    assert is_finding(CompileError("no")) and not is_finding(AssertionError("other bits"))
    group = AssertionError("several")
    group.exceptions = (outside, inside)
    assert is_finding(group)
