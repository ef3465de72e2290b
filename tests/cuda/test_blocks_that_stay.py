"""Blocks of wgmma's backward that take more than one key tile: calls with as many as that needs."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash._cuda import device
from cupyflash._cuda.config_wgmma import WgmmaBackwardConfig
from cupyflash._cuda.plan_wgmma_backward import plan_backward
from cupyflash._problem import Problem
from tests.cases import Shape
from tests.harness import check, draw


@pytest.fixture(autouse=True)
def of_wgmma_alone(engine: str) -> None:
    if engine != "wgmma" or device.current().compute_capability != (9, 0):
        pytest.skip("blocks of the others take one tile each")


def config_of(shape: Shape, causal: bool) -> WgmmaBackwardConfig:
    """What a call of that shape runs."""
    problem = Problem("float16", *shape, 0.1, None, 0 if causal else None)
    return plan_backward(problem, device.current()).config


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("head_dim", "causal"), [(64, False), (64, True), (128, True)])
def test_whole_heads(
    rng: np.random.Generator, engine: str, head_dim: int, causal: bool, deterministic: bool
) -> None:
    """Some blocks take two heads."""
    batch = 2 * device.current().multiprocessors - 1
    shape = Shape(batch, 150, 270, 2, 1, head_dim, head_dim)
    assert config_of(shape, causal).whole_heads
    arguments = draw(rng, shape, "float16", ("gqa", "causal") if causal else ("gqa",))
    check(engine, on=engine, **arguments, deterministic=deterministic)


@pytest.mark.parametrize(
    ("head_dim", "seqlen_q", "causal"),
    [(64, 70, False), (64, 70, True), (96, 70, True), (256, 70, False), (256, 520, True)],
)
def test_key_tile_after_key_tile(
    rng: np.random.Generator, engine: str, head_dim: int, seqlen_q: int, causal: bool
) -> None:
    """Of too few heads to take them whole."""
    batch = 3 * device.current().multiprocessors // 2
    shape = Shape(batch, seqlen_q, 300, 1, 1, head_dim, head_dim)
    config = config_of(shape, causal)
    assert config.persistent and not config.whole_heads
    check(engine, on=engine, **draw(rng, shape, "float16", ("causal",) if causal else ()))
