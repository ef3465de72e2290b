"""``bench --tune`` with the NumPy engine for a GPU, and the tiles that it would try."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyflash import _validate
from cupyflash.__main__ import main
from cupyflash._cuda import tuned, warn
from cupyflash._cuda.candidates import candidates
from cupyflash._cuda.device import Device
from cupyflash._cuda.engines import PLANNERS, runs_on
from cupyflash._options import Options
from cupyflash._problem import Problem
from cupyflash.bench import command, tune
from cupyflash.bench.runner import Stopwatch
from cupyflash.bench.workloads import DIRECTIONS, Workload
from cupyflash.tiling import Tiling
from tests.bench_fakes import SMALL, make_inputs

AMPERE = Device.known("sm_80")
TILES = [Tiling(16, 16), Tiling(32, 16), Tiling(64, 16), Tiling(16, 32)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(warn, "_given", set())
    monkeypatch.setattr(tune, "candidates", lambda *call: TILES)


def run(times: Mapping[str, float], rng: np.random.Generator, direction: str = "forward") -> str:
    """Tune SMALL, where a tile takes `times` of its name, else 2, and the default 1."""

    def milliseconds(works: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        for work in works.values():
            work()
        return {name: times.get(name, 1.0 if name == "default" else 2.0) for name in works}

    copies = [make_inputs(SMALL, rng) for _ in range(2)]
    stopwatch = Stopwatch(milliseconds, lambda work: 0)
    return tune.tune_tiles(SMALL, direction, "numpy", AMPERE, copies, stopwatch)


def remembered(direction: str = "forward") -> object:
    return tuned.find("numpy", direction, tune.problem_of(SMALL), AMPERE)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_fastest_is_remembered(direction: str, rng: np.random.Generator) -> None:
    output = run({repr(TILES[1]): 0.5, repr(TILES[2]): 0.8}, rng, direction)
    assert remembered(direction) == TILES[1]
    assert output.endswith(f"remembered: {TILES[1]!r}")
    heats, final = output.split("the best once more")
    assert re.findall(r"[0-9.]+$", heats, re.MULTILINE) == [
        "2.000", "1.250", "1.000", "0.500", "0.500",
    ]  # fmt: skip
    assert len(final.splitlines()) == 1 + 1 + 4 + 1
    assert len(tuned.entries()) == 1


@pytest.mark.parametrize("best", [0.99, 1.0, 1.5])
def test_the_default_stays_unless_another_is_clearly_faster(
    best: float, rng: np.random.Generator
) -> None:
    tuned.remember("numpy", "forward", tune.problem_of(SMALL), AMPERE, TILES[0])
    assert run({repr(TILES[1]): best}, rng).endswith("the default stays")
    assert remembered() is None  # what was true before is not any more


def test_a_wrong_tile_does_not_win(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = tune.Tiled.arrays

    def first_batch_wrong(tiled: tune.Tiled, result: Any) -> Any:
        out, *rest = arrays(tiled, result)
        if tiled.tile == TILES[1]:
            out[0, 0, 0, 0] += 100
        return out, *rest

    monkeypatch.setattr(tune.Tiled, "arrays", first_batch_wrong)
    output = run({repr(TILES[1]): 0.5, repr(TILES[3]): 0.6}, rng)
    assert remembered() == TILES[3]
    assert f"{TILES[1]!r}: ArithmeticError: wrong by" in output


def test_the_problem_is_that_of_a_public_call(rng: np.random.Generator) -> None:
    for causal in (False, True):
        workload = replace(SMALL, causal=causal)
        inputs = make_inputs(workload, rng)
        options = Options(causal=causal)
        call = _validate.bind(inputs.query, inputs.key, inputs.value, options, out=None)
        assert call.problem == tune.problem_of(workload)


# --- the command --------------------------------------------------------------------------------


def test_the_command_tunes_what_it_is_given(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Workload, str, str]] = []

    def record(
        workload: Workload, direction: str, engine: str, device: Device, *rest: object
    ) -> str:
        asked.append((workload, direction, engine))
        return "a table"

    monkeypatch.setattr(command, "tune_tiles", record)
    monkeypatch.setattr(command, "current", lambda: AMPERE)
    monkeypatch.setattr("cupyflash._engines.describe", lambda device_id: AMPERE)
    monkeypatch.setattr(command, "draw", partial(make_inputs, rng=rng))
    monkeypatch.setattr(command, "copies_beyond", lambda cache, workload: 1)
    monkeypatch.setattr(command, "release", lambda: None)
    shape = ["--shapes", "1,32,2,16", "--masks", "causal"]
    main(["bench", "--tune", *shape, "--dtype", "float16"])
    main(["bench", "--tune", *shape, "--dtype", "float32", "--directions", "forward"])
    main(["bench", "--tune", *shape, "--dtype", "float32", "--engine", "mma"])
    causal = Workload(1, 32, 32, 2, 2, 16, True, "float16")
    assert asked == [
        (causal, "forward", "mma"),
        (causal, "backward", "mma"),
        (replace(causal, dtype="float32"), "forward", "simt"),
    ]
    printed = capsys.readouterr()
    assert printed.out.count("a table") == 3
    assert "engine='mma' lacks float32" in printed.err


def test_json_and_plots_are_refused(tmp_path: Path) -> None:
    for option in ("--json", "--plot"):
        with pytest.raises(SystemExit, match="--tune"):
            main(["bench", "--tune", option, str(tmp_path / "a")])


# --- the tiles ----------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
@pytest.mark.parametrize("engine", PLANNERS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("head_dim", [32, 80, 128, 256])
def test_candidates_are_legal_different_and_few(
    engine: str, direction: str, head_dim: int, arch: str
) -> None:
    device = Device.known(arch)
    planner = PLANNERS[engine]
    if not runs_on(engine, device):
        pytest.skip("another GPU's engine")
    problem = Problem("float16", 2, 512, 512, 8, 8, head_dim, head_dim, 0.1)
    plan = getattr(planner, f"plan_{direction}")
    tiles = candidates(engine, direction, problem, device)
    stubs = {plan(problem, device, tile).stub for tile in (None, *tiles)}
    assert len(stubs) == 1 + len(tiles) < 50
    if engine in ("simt", "mma") and head_dim <= 128:
        assert len(tiles) > 5
