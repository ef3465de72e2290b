"""Which arrays Hopper's copy engine reads, and what becomes of a call with others."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import Tiling, UnsupportedError, _engines
from cupyflash._cuda import forward, plan_wgmma, tensor_map
from cupyflash._cuda.plan_wgmma import unreadable
from cupyflash._problem import Operands
from tests.compile_ahead.__main__ import ROOT
from tests.unit.test_plan_wgmma import HOPPER, problem_of

Q, K = (2, 300, 4, 64), (2, 500, 2, 64)


def array_of(shape: tuple[int, ...], strides: Any = None, address: int = 4096) -> Any:
    """What is asked of a device array of float16."""
    strides = strides or np.empty(shape, np.float16).strides
    data = SimpleNamespace(ptr=address)
    return SimpleNamespace(shape=shape, strides=strides, ndim=len(shape), data=data)


def reason(q: Any = None, k: Any = None, v: Any = None, **changes: Any) -> str | None:
    """`unreadable` of a call that is readable but for what is given."""
    operands = Operands(q or array_of(Q), k or array_of(K), v or array_of(K))
    return unreadable(problem_of(**changes), operands)


def test_dense_arrays_of_whole_vectors_are_read() -> None:
    assert reason() is None


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("wrong", [0, -2048, 8, 2**40])
def test_the_reason_names_array_axis_and_stride(name: str, axis: int, wrong: int) -> None:
    shape = Q if name == "q" else K
    strides = list(np.empty(shape, np.float16).strides)
    strides[axis] = wrong
    said = reason(**{name: array_of(shape, tuple(strides))})
    assert said and f"{name}'s {('batch', 'seqlen', 'heads')[axis]} axis" in said
    assert f"stride is {wrong} bytes" in said


def test_the_largest_stride_is_read() -> None:
    assert tensor_map.MAX_STRIDE == 2**40 - 1
    assert reason(k=array_of(K, (2**40 - 16, 256, 128, 2))) is None


def test_the_reason_names_an_unaligned_address() -> None:
    said = reason(v=array_of(K, address=4096 + 8))
    assert said and "v's address 0x1008" in said


BIAS = (2, 4, 300, 504)


def reason_of_bias(
    shape: tuple[int, ...] = BIAS,
    dtype: str = "float16",
    strides: Any = None,
    address: int = 4096,
    **changes: Any,
) -> str | None:
    """`unreadable` of a call that is readable but for its bias."""
    bias = array_of(shape, strides, address)
    options = {"seqlen_k": 504, "extras": frozenset({"bias"})} | changes
    problem = problem_of(bias_dtype=dtype, bias_shape=shape, **options)
    return unreadable(problem, Operands(array_of(Q), array_of(K), array_of(K), bias=bias))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("lead", [(2, 4), (1, 4), (2, 1), (1, 1)], ids=str)
def test_a_bias_of_whole_vectors_is_read(dtype: str, lead: tuple[int, int]) -> None:
    assert reason_of_bias((*lead, 300, 504), dtype) is None
    padded = 4 * 300 * 1008, 300 * 1008, 1008, 2
    assert reason_of_bias((*lead, 300, 499), dtype, padded, seqlen_k=499) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "float32"}, "dtype float32: its copy engine reads float16 and bfloat16"),
        ({"shape": (2, 4, 1, 504)}, "axis of queries, which is broadcast"),
        ({"shape": (2, 4, 300, 1)}, "axis of keys, which is broadcast"),
        ({"address": 4104}, "address 0x1008"),
        ({"strides": (4 * 300 * 1008, 300 * 1008, 2, 600)}, "axis of keys, whose stride is 600"),
        ({"strides": (4 * 300 * 1008, 300 * 1008, 1006, 2)}, "queries axis, whose stride is 1006"),
        ({"strides": (4 * 300 * 1008, 300 * 1008, -1008, 2)}, "queries axis, whose stride is -"),
        ({"strides": (4 * 300 * 1008, 0, 1008, 2)}, "heads axis, whose stride is 0"),
        ({"strides": (2**40, 300 * 1008, 1008, 2)}, "batch axis, whose stride"),
    ],
    ids=str,
)
def test_the_reason_says_what_a_bias_has(changes: dict[str, Any], said: str) -> None:
    found = reason_of_bias(**changes)
    assert found and said in found and "its copy engine reads" in found


@pytest.mark.parametrize("empty", [{"seqlen_q": 0}, {"seqlen_k": 0}])
def test_an_empty_call_has_a_bias_that_is_read_or_not(empty: dict[str, int]) -> None:
    """Or the planner would refuse it, though it has nothing to read."""
    shape = (2, 4, empty.get("seqlen_q", 300), empty.get("seqlen_k", 504))
    assert reason_of_bias(shape, **empty) is None
    found = reason_of_bias(shape, "float32", **empty)
    assert found and "dtype float32" in found


def test_axes_of_length_one_are_never_taken() -> None:
    operands = Operands(
        array_of((1, 1, 1, 64), (0, -8, 3, 2)),
        array_of((1, 1, 1, 64), (3, 7, 7, 2)),
        array_of((1, 500, 1, 64), (0, 128, 0, 2)),
    )
    problem = problem_of(batch=1, seqlen_q=1, num_heads=1, num_heads_kv=1)
    assert unreadable(problem, operands) is None


@pytest.mark.parametrize("empty", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}])
def test_of_an_empty_call_nothing_is_read(empty: dict[str, int]) -> None:
    assert reason(k=array_of(K, (1, 1, 1, 2), address=1), **empty) is None


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_engines, "describe", lambda device_id: HOPPER)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_choose_tiling_sees_strides(layout: str) -> None:
    shape = (1, 256, 2, 64) if layout == "bshd" else (1, 2, 256, 64)

    def choose(x: Any, engine: str | None = None, tiling: Tiling | None = None) -> Tiling:
        return cupyflash.choose_tiling(
            x, x, x, layout=layout, engine=engine, tiling=tiling, device=0
        )

    dense, narrow = np.empty(shape, np.float16), np.empty((*shape[:3], 68), np.float16)[..., :64]
    by_wgmma, by_mma = choose(dense, "wgmma"), choose(dense, "mma")
    assert by_wgmma != by_mma
    assert choose(dense) == by_wgmma
    assert choose(narrow) == by_mma  # rows of 136 bytes
    assert choose(dense, "wgmma", Tiling(64, 64, 3, 8)) == Tiling(64, 64, 3, 8)
    with pytest.raises(UnsupportedError, match=r"engine='wgmma' lacks.* q's \w+ axis.* bytes"):
        choose(narrow, "wgmma")


def test_an_empty_call_needs_no_engine_but_its_tiling_must_be_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned: list[Any] = []

    def load(stub: str, entries: Any, device_id: int, plan: Any) -> Any:
        planned.append(plan)
        return SimpleNamespace(get_function=lambda entry, shared_memory: entry)

    monkeypatch.setattr(forward, "describe", lambda device_id: HOPPER)
    monkeypatch.setattr(forward, "load", load)
    monkeypatch.setattr(forward, "Launcher", lambda *arguments, **rest: None)
    monkeypatch.setattr(forward.tuned, "find", lambda *arguments: None)
    strides = np.empty((1, 0, 1, 64), np.float16).strides
    optional = forward.OptionalLayout.of(Operands(None, None, None))
    layout = forward.ForwardLayout(*[strides] * 4, None, None, optional, 16, 16)

    def prepare(tiling: Tiling) -> Any:
        problem = problem_of(seqlen_k=0)
        return forward._prepare.__wrapped__("wgmma", problem, 0, tiling, layout)

    fits = Tiling(64, 64, 3, 8)
    assert plan_wgmma.plan_forward(problem_of(), HOPPER, fits).tiling == fits
    assert prepare(fits).launches
    assert planned[-1].engine == "mma"
    with pytest.raises(UnsupportedError, match="block_m"):
        prepare(Tiling(96, 64, 3, 8))


CALLS = """\
import cupyflash
from cupyflash import _recipe
from cupyflash._cuda import forward, tensor_map
from tests.compile_ahead import plugin, stand_in

stand_in.install()
import cupy

engines = []


def load(stub, entries, device_id, plan):
    engines.append(plan.engine)
    return stand_in.Part("module", get_function=lambda entry, shared_memory: stand_in.Function())


forward.load = load
tensor_map._encoder = lambda: plugin._describe


def call(x, **options):
    engines.clear()
    forward._prepare.cache_clear()
    _recipe._recipes.clear()
    for _ in range(2):  # the second time by its recipe
        cupyflash.flash_attention(x, x, x, **options)
    return engines[-1]


def refused(x, **options):
    try:
        call(x, **options)
    except cupyflash.UnsupportedError as error:
        return "copy engine" in str(error) and "heads axis" in str(error)


dense, wide = (cupy.zeros((1, 16, 2, d), "float16") for d in (64, 60))
assert call(dense) == call(dense, engine="wgmma") == "wgmma"
bias = cupy.zeros((1, 2, 16, 16), "float16")
call(dense, bias=bias)
assert engines[:2] == ["wgmma", "mma"]
assert call(dense, bias=bias.astype("float32")) == "mma" and "wgmma" not in engines
assert call(dense, alibi_slopes=cupy.zeros(2, "float32")) == "wgmma"
assert call(wide) == "mma"
assert refused(wide, engine="wgmma")
assert refused(wide, engine="wgmma", tiling=cupyflash.Tiling(64, 64, 3, 8))
for empty in (dense[:0], dense[:, :0], wide[:, :0]):
    assert call(empty, engine="wgmma") == "mma"
"""


def test_a_named_engine_serves_the_call_or_says_what_it_cannot_read() -> None:
    subprocess.run([sys.executable, "-c", CALLS], cwd=ROOT, check=True)
