"""A remembered tiling on a real GPU: calls take it, and results stay right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cupyflash import _recipe, choose_tiling, flash_attention, flash_attention_forward
from cupyflash.__main__ import main
from cupyflash._cuda import backward, cache, device, forward, tuned
from cupyflash._cuda.candidates import candidates
from cupyflash._problem import Problem
from cupyflash.attention import flash_attention_backward
from cupyflash.bench.workloads import DIRECTIONS


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path))
    as_if_new_process()


def as_if_new_process() -> None:
    forward._prepare.cache_clear()
    backward._prepare.cache_clear()
    _recipe._recipes.clear()


def test_calls_take_what_is_remembered(engine: str, rng: np.random.Generator) -> None:
    cupy = device.require_cupy()
    shape = (2, 200, 4, 64)
    q, k, v, dout = (cupy.asarray(rng.standard_normal(shape), "float16") for _ in range(4))

    def results() -> list[np.ndarray]:
        as_if_new_process()
        out = flash_attention(q, k, v, engine=engine)
        _, saved = flash_attention_forward(q, k, v, engine=engine)
        found = (out, *flash_attention_backward(dout, saved)[:3])
        return [each.get().astype(np.float64) for each in found]

    problem = Problem("float16", 2, 200, 200, 4, 4, 64, 64, 0.125)
    gpu = device.current()
    before, default = results(), choose_tiling(q, k, v, engine=engine)
    kernels = len(cache.entries())
    tiles = {each: candidates(engine, each, problem, gpu)[-1:] for each in DIRECTIONS}
    if not all(tiles.values()):
        pytest.skip("the engine has one tile alone")
    for direction, (tile,) in tiles.items():
        assert tuned.remember(engine, direction, problem, gpu, tile)
    chosen = choose_tiling(q, k, v, engine=engine)
    assert chosen.origin == "tuned" and default.origin == "table"
    for tuned_result, result in zip(results(), before, strict=True):
        assert np.linalg.norm(tuned_result - result) < 3e-3 * np.linalg.norm(result)
    assert len(cache.entries()) == kernels + 2


def test_the_command_tunes(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--shapes", "1,256,4,32", "--masks", "causal", "--dtype", "float16"]
    main(["bench", "--tune", *shape, "--rounds", "1", "--engine", engine])
    printed = capsys.readouterr().out
    for direction in DIRECTIONS:
        assert f"1 x 256 x 4 x 32 causal, {direction}, engine {engine}" in printed
    assert printed.count("the best once more") == 2
    assert "Error" not in printed
