"""The peer torch-flex beside ours, with a PyTorch made of NumPy."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupyflash.__main__ import main
from cupyflash.bench import features, flex_peer
from cupyflash.bench.features import FEATURES, line, measure
from cupyflash.bench.workloads import DIRECTIONS
from tests import torch_fake
from tests.bench_fakes import SMALL, fake_times, make_inputs


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> Any:
    modules = torch_fake.modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("cupyflash.bench.torch_peers.require_cupy", lambda: np)  # for from_dlpack
    draw = lambda shape, dtype: rng.standard_normal(shape).astype(dtype)  # noqa: E731
    monkeypatch.setattr(features, "normal", draw)
    return modules["torch"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_it_takes_its_turn_where_it_has_the_feature(rng: Any, direction: str, causal: bool) -> None:
    workload = replace(SMALL, seqlen_q=30, causal=causal)
    results = measure(workload, direction, make_inputs(workload, rng), None, True, fake_times)
    assert [each.error or each.flex_error for each in results] == [None] * len(FEATURES)
    timed = [each.feature for each in results if each.flex_milliseconds == 3.0]  # the third
    assert timed == [each.name for each in FEATURES if each.score is not None]
    assert len(timed) == 3


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_wrong_result_is_not_timed(rng: Any, torch: Any, direction: str) -> None:
    torch.tanh = np.sin
    inputs = make_inputs(SMALL, rng)
    results = measure(SMALL, direction, inputs, None, True, fake_times)
    found = next(each for each in results if each.feature.startswith("softcap"))
    assert found.error is None and found.slow_down == 2.0 and found.flex_milliseconds is None
    assert "ArithmeticError: torch-flex differs by" in line(found)


def test_it_says_why_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flex_peer.missing() is None
    monkeypatch.setitem(sys.modules, "torch.nn.attention.flex_attention", None)
    assert "flex_attention" in str(flex_peer.missing())


def test_it_has_no_place_in_the_race() -> None:
    with pytest.raises(SystemExit, match="leave out --peers torch-flex, which bench without"):
        main(["bench", "--peers", "torch-flex"])
