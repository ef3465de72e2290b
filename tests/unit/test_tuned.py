"""What tuning remembers: for whom, until when, and what happens to damaged files."""

from __future__ import annotations

import json
import multiprocessing
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cupyflash
from cupyflash import _engines
from cupyflash._arrays import Place
from cupyflash._cuda import backward, cache, forward, plan_mma, plan_mma_backward, tuned, warn
from cupyflash._cuda.device import Device
from cupyflash._cuda.tiles_mma import MmaBackwardTile, MmaForwardTile
from cupyflash._problem import Problem
from cupyflash.tiling import Tiling

HOPPER = Device.known("sm_90a")
PROBLEM = Problem("bfloat16", 32, 512, 512, 8, 8, 256, 256, 0.0625)
FORWARD = MmaForwardTile(128, 32, 8, 6, 1)
BACKWARD = MmaBackwardTile(64, 64, 4, 2, 1)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(warn, "_given", set())
    return tmp_path / "cache"


def find(problem: Problem = PROBLEM, direction: str = "forward", device: Device = HOPPER) -> object:
    return tuned.find("mma", direction, problem, device)


def remember(tile: tuned.Tile = FORWARD, direction: str = "forward") -> bool:
    return tuned.remember("mma", direction, PROBLEM, HOPPER, tile)


@pytest.mark.parametrize("tile", [FORWARD, BACKWARD, Tiling(64, 32, 1, 4)])
def test_every_kind_of_tile_comes_back(tile: tuned.Tile) -> None:
    assert find() is None
    assert remember(tile)
    assert find() == tile
    assert len(tuned.entries()) == 1
    tuned.forget("mma", "forward", PROBLEM, HOPPER)
    tuned.forget("mma", "forward", PROBLEM, HOPPER)
    assert find() is None


def test_directions_have_their_own() -> None:
    remember(FORWARD)
    remember(BACKWARD, "backward")
    assert (find(), find(direction="backward")) == (FORWARD, BACKWARD)


@pytest.mark.parametrize(
    "like", [{"seqlen_q": 400, "seqlen_k": 257}, {"batch": 64}, {"softmax_scale": 1.0}]
)
def test_similar_calls_share(like: dict[str, float]) -> None:
    remember()
    assert find(replace(PROBLEM, **like)) == FORWARD  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "float16"},
        {"head_dim": 128},
        {"head_dim_v": 128},
        {"seqlen_q": 513},
        {"seqlen_k": 256},
        {"batch": 1},  # fills a quarter of the GPU
        {"num_heads_kv": 2},
        {"window_right": 0},
        {"window_left": 9},
        {"softcap": 5.0},
        {"varlen": True},
        {"extras": frozenset({"sinks"})},
    ],
)
def test_other_calls_do_not(other: dict[str, object]) -> None:
    remember()
    assert find(replace(PROBLEM, **other)) is None  # type: ignore[arg-type]


def test_other_gpus_do_not() -> None:
    remember()
    assert find(device=replace(HOPPER, name="NVIDIA H200")) is None
    assert find(device=replace(HOPPER, multiprocessors=114)) is None


def test_changed_sources_make_it_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    remember()
    monkeypatch.setattr(tuned, "_sources", lambda: "others")
    assert find() is None
    remember(Tiling(64, 32, 2, 4))
    assert find() == Tiling(64, 32, 2, 4)
    assert len(tuned.entries()) == 1


def test_a_changed_size_makes_it_unknown(folder: Path) -> None:
    remember()
    (file,) = folder.glob("tuned-*")
    file.write_text(file.read_text().replace("128", "12800"))
    assert find() is None


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", "3", "{}", '{"kind": 1, "sizes": 2}', "\xff", '{"kind": "Tiling"}']
)
def test_a_damaged_file_warns_once_and_is_ignored(folder: Path, damage: str) -> None:
    remember()
    (file,) = folder.glob("tuned-*")
    file.write_bytes(damage.encode("latin-1"))
    with pytest.warns(RuntimeWarning, match="clear-cache"):
        assert find() is None
    assert find() is None
    assert remember()
    assert find() == FORWARD


def test_an_unknown_kind_with_the_right_digest_is_damage(folder: Path) -> None:
    remember()
    (file,) = folder.glob("tuned-*")
    content = json.loads(file.read_text())
    content |= {"kind": "Other", "digest": tuned._digest("Other", content["sizes"])}
    file.write_text(json.dumps(content))
    with pytest.warns(RuntimeWarning, match="Other"):
        assert find() is None


def test_a_folder_that_cannot_be_written_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "file" / "folder"))
    with pytest.warns(RuntimeWarning, match="nothing is remembered"):
        assert not remember()
    assert not remember()
    assert find() is None


def test_threads_and_processes_share_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(lambda _: remember() and find() == FORWARD, range(100)))
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as processes:
        assert processes.map(_remember_and_find, range(4)) == [FORWARD] * 4
    assert [file.name for file in cache.path().iterdir()] == [x.name for x in tuned.entries()]


def _remember_and_find(_: int) -> object:
    remember()
    return find()


def test_clearing_the_cache_forgets() -> None:
    remember()
    assert cache.size() > 0
    assert cache.clear() == 0  # kernels
    assert tuned.entries() == []
    assert find() is None


# --- who uses it --------------------------------------------------------------------------------


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_engines, "describe", lambda device_id: HOPPER)


@pytest.mark.usefixtures("hopper")
def test_choose_tiling_takes_it_and_says_so() -> None:
    def choose(tiling: Tiling | None = None) -> Tiling:
        return _engines.choose_tiling(PROBLEM, Place(0), "mma", tiling)

    table = choose()
    assert table == plan_mma.plan_forward(PROBLEM, HOPPER).tiling
    assert table.origin == "table" and "table" in str(table)
    remember()
    chosen = choose()
    assert chosen == Tiling(128, 32, 2, 8)
    assert chosen.origin == "tuned" and "bench --tune" in str(chosen)
    given = choose(table)
    assert given == table and given.origin == "given" and str(given) == repr(given)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_calls_without_a_tiling_take_it(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    class Asked(Exception):
        pass

    def plan(problem: Problem, device: Device, tiling: object, *rest: object) -> None:
        asked.append(tiling)
        raise Asked

    module = {"forward": forward, "backward": backward}[direction]
    planner = SimpleNamespace(plan_forward=plan, plan_backward=plan)
    monkeypatch.setattr(module, "PLANNERS", {"mma": planner})
    monkeypatch.setattr(module, "describe", lambda device_id: HOPPER)
    layout = SimpleNamespace(vector_bytes=(16, 16), optional=SimpleNamespace(bias_bytes=1))
    prepare = {
        "forward": partial(forward._prepare.__wrapped__, "mma", PROBLEM, 0, layout=layout),
        "backward": partial(
            backward._prepare.__wrapped__, "mma", PROBLEM, 0, layout=layout, deterministic=False
        ),
    }[direction]
    given = Tiling(64, 32, 2, 4)
    for tiling in (None, given):
        with pytest.raises(Asked):
            prepare(tiling=tiling)
    remember(BACKWARD, direction)
    for tiling in (None, given):
        with pytest.raises(Asked):
            prepare(tiling=tiling)
    assert asked == [None, given, BACKWARD, given]


def test_choose_tiling_on_the_host_says_who_chose() -> None:
    q = np.zeros((1, 8, 1, 8), np.float32)
    assert cupyflash.choose_tiling(q, q, q).origin == "table"
    assert cupyflash.choose_tiling(q, q, q, tiling=Tiling(4, 4)).origin == "given"


def test_a_tiling_that_stands_in_the_table_is_the_tables() -> None:
    """What choose_tiling returns, handed in again, is the same kernel."""
    table = plan_mma.plan_forward(PROBLEM, HOPPER)
    assert plan_mma.plan_forward(PROBLEM, HOPPER, table.tiling) == table
    other = plan_mma.plan_forward(PROBLEM, HOPPER, Tiling(64, 48, 2, 4))
    assert other.config.kept_steps == 0


def test_plans_take_the_engines_own_tiles() -> None:
    forward = plan_mma.plan_forward(PROBLEM, HOPPER, FORWARD)
    assert (forward.config.kept_steps, forward.blocks) == (6, 1)
    assert forward.tiling == Tiling(128, 32, 2, 8)
    backward = plan_mma_backward.plan_backward(PROBLEM, HOPPER, BACKWARD)
    assert (backward.config.key_warps, backward.config.query_warps) == (4, 2)
