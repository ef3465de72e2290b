"""Made-up contenders race: who fails is reported, and the others run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupyflash.bench.inputs import Inputs
from cupyflash.bench.peers import Ours
from cupyflash.bench.runner import Stopwatch, race
from cupyflash.bench.torch_peers import TorchPeer, materialised, sdpa
from cupyflash.bench.workloads import (
    DIRECTIONS,
    Workload,
)
from tests.bench_fakes import SMALL, Fake, crash, fake_times, make_inputs
from tests.cases import FLOAT8


class Picky(Fake):
    def supports(self, workload: Workload) -> bool:
        return False


STOPWATCH = Stopwatch(fake_times, lambda work: 1000)


def test_float8_is_held_to_its_own_numbers(rng: np.random.Generator) -> None:
    """3 bits of probabilities may be missing, but nothing else."""
    workload = replace(SMALL, dtype=FLOAT8.name)
    wrong = Fake("wrong", lambda arrays: [1.1 * each.astype(np.float32) for each in arrays])
    inputs = make_inputs(workload, rng)
    assert inputs.query.dtype == FLOAT8
    ours, other = race(workload, "forward", [Ours(), wrong], [inputs], STOPWATCH)
    assert ours.error is None and "wrong by" in str(other.error)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_who_fails_is_reported_and_the_others_run(direction: str, rng: np.random.Generator) -> None:
    contenders = [
        Ours(),
        Fake("crashes", crash),
        Fake("wrong", lambda arrays: [1.01 * each for each in arrays]),
        Picky("picky"),
        Fake("fine"),
    ]
    found = race(SMALL, direction, contenders, [make_inputs(SMALL, rng)], STOPWATCH)
    assert [each.contender for each in found] == ["cupyflash", "crashes", "wrong", "fine"]
    ours, crashed, wrong, fine = found
    assert (ours.milliseconds, fine.milliseconds) == (1.0, 2.0)
    assert ours.extra_bytes == 1000 and ours.error is None
    assert ours.tflops == SMALL.flops(direction) / 1e9
    assert crashed.error == "RuntimeError: no kernel\nfor this device"
    assert wrong.error is not None and "wrong by 0.01" in wrong.error
    assert crashed.milliseconds is wrong.milliseconds is wrong.extra_bytes is wrong.tflops is None


@pytest.mark.parametrize("part", [1, 2])
def test_wrong_dk_or_dv_is_seen(part: int, rng: np.random.Generator) -> None:
    def fault(arrays: Any) -> Any:
        return [2 * each if number == part else each for number, each in enumerate(arrays)]

    inputs = [make_inputs(SMALL, rng)]
    _, wrong = race(SMALL, "backward", [Ours(), Fake("wrong", fault)], inputs, STOPWATCH)
    assert wrong.error is not None and "wrong by 1 " in wrong.error


def test_nan_is_wrong(rng: np.random.Generator) -> None:
    broken = Fake("nan", lambda arrays: [each * np.nan for each in arrays])
    (found,) = race(SMALL, "forward", [broken], [make_inputs(SMALL, rng)], STOPWATCH)
    assert found.error is not None and "wrong by nan" in found.error


def test_timing_that_fails_is_everybodys_error(rng: np.random.Generator) -> None:
    def fail(works: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        raise MemoryError("full")

    inputs = [make_inputs(SMALL, rng)]
    stopwatch = Stopwatch(fail, lambda work: 1000)
    found = race(SMALL, "forward", [Ours(), Fake("fine")], inputs, stopwatch)
    assert [each.error for each in found] == ["timing failed: MemoryError: full"] * 2
    assert [each.extra_bytes for each in found] == [None, None]


def test_calls_take_the_next_inputs(rng: np.random.Generator) -> None:
    seen = []

    class Watched(Ours):
        def forward(self, workload: Workload, inputs: Inputs) -> Callable[[], Any]:
            work = super().forward(workload, inputs)
            return lambda: (seen.append(inputs), work())[1]

    def three_calls(works: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        seen.clear()
        for _ in range(3):
            works["cupyflash"]()
        return {"cupyflash": 1.0}

    one, other = (make_inputs(SMALL, rng) for _ in range(2))
    race(SMALL, "forward", [Watched()], [one, other], Stopwatch(three_calls, lambda work: 0))
    assert seen == [one, other, one]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("causal", [False, True])
def test_torch_peers_on_the_cpu(
    direction: str, causal: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr("cupyflash.bench.torch_peers.require_cupy", lambda: np)  # for from_dlpack
    workload = replace(SMALL, num_heads_kv=4, causal=causal, dtype="float16")
    contenders = [
        Ours(),
        TorchPeer("materialised", lambda: materialised, dense=True),
        TorchPeer("math", sdpa("MATH"), bottom_right=False),
    ]
    copies = [make_inputs(workload, rng) for _ in range(2)]
    found = race(workload, direction, contenders, copies, STOPWATCH)
    assert [each.error for each in found] == [None] * 3
