"""The backward of wgmma against the dense reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash._cuda import backward
from cupyflash._cuda.tiles_wgmma_backward import WgmmaBackwardTile, bucket_backward
from tests.cases import Shape
from tests.harness import call, check, draw, same_bits
from tests.memory import Guarded, to_engine, to_host

# Tiles have 64 or 128 queries and 64 or 128 keys: one and several, whole and ragged ones. Above
# 128 columns, with softcap at 64 and where v alone is wide, warpgroups have roles.
SINKS = np.array([3.5], np.float32)  # so large that their gradient is more than its tolerance
# Every other one is deterministic: also where later queries do not see the first key tiles.
CASES: dict[str, tuple[Shape, str, tuple[str, ...], dict[str, Any]]] = {
    "full": (Shape(1, 130, 137, 1, 1, 128, 128), "bfloat16", ("dlse",), {}),
    "causal": (Shape(1, 100, 150, 2, 1, 128, 128), "float16", ("causal", "gqa"), {}),
    "top left": (Shape(1, 150, 70, 1, 1, 64, 64), "bfloat16", ("top_left", "sinks"), {}),
    "narrow": (Shape(2, 135, 140, 1, 1, 40, 64), "float16", (), {}),
    "softcap": (Shape(1, 70, 100, 1, 1, 64, 64), "bfloat16", ("softcap", "causal"), {}),
    "window": (Shape(1, 200, 260, 1, 1, 80, 128), "bfloat16", (), {"window": (30, 9)}),
    "wide values": (Shape(1, 70, 70, 1, 1, 24, 96), "float16", ("softcap", "dlse"), {}),
    "widest": (Shape(1, 70, 100, 1, 1, 256, 256), "float16", ("causal", "dlse"), {}),
    "padded": (Shape(1, 70, 70, 1, 1, 136, 200), "float16", ("top_left",), {"sinks": SINKS}),
    "wider than v": (Shape(1, 150, 140, 2, 1, 192, 128), "bfloat16", ("gqa",), {"window": (20, 7)}),
    "one row": (Shape(1, 1, 129, 2, 2, 96, 64), "bfloat16", ("scale",), {}),
}


@pytest.fixture(autouse=True)
def launched(kernel_names: list[str]) -> Iterator[list[str]]:
    """Names of the kernels that run; the backward's is wgmma's own."""
    yield kernel_names
    assert "cupyflash_backward_wgmma" in kernel_names


@pytest.mark.parametrize("case", CASES)
def test_gradients(rng: Any, case: str) -> None:
    shape, dtype, features, options = CASES[case]
    arguments = draw(rng, shape, dtype, features)
    deterministic = [*CASES].index(case) % 2 == 1
    check("wgmma", **arguments, **options, deterministic=deterministic)


# Queries, keys, stages, those of grad_out, P rounded at once, roles, dQ added directly.
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "tile"),
    [
        (128, WgmmaBackwardTile(64, 128, 3, 1, True, False, True)),
        (128, WgmmaBackwardTile(64, 128, 2, 2, True)),
        (96, WgmmaBackwardTile(64, 128, 2, 3, False)),
        (64, WgmmaBackwardTile(128, 128, 2, 2, False, False, True)),
        (64, WgmmaBackwardTile(64, 64, 2, 2, True)),
        (128, WgmmaBackwardTile(64, 128, 2, 1, False)),
        (128, WgmmaBackwardTile(64, 64, 2, 1, True, True)),
    ],
)
def test_tiles_that_tuning_tries(
    rng: Any,
    monkeypatch: pytest.MonkeyPatch,
    head_dim: int,
    tile: WgmmaBackwardTile,
    deterministic: bool,
) -> None:
    monkeypatch.setattr(backward.tuned, "find", lambda *call: tile if "backward" in call else None)
    backward._prepare.cache_clear()
    arguments = draw(rng, Shape(1, 140, 150, 1, 1, head_dim, head_dim), "bfloat16", ["causal"])
    check("wgmma", **arguments, deterministic=deterministic)
    backward._prepare.cache_clear()


# Three blocks take a dozen key tiles. Those that no query sees are written too: the first and the
# last ones.
STAYING: dict[str, tuple[WgmmaBackwardTile, Shape, tuple[str, ...], dict[str, Any]]] = {
    "full": (
        WgmmaBackwardTile(128, 128, 2, 1, False, False, True, True),
        Shape(2, 200, 260, 4, 2, 64, 64), ("gqa",), {},
    ),
    "one row": (
        WgmmaBackwardTile(64, 128, 2, 1, True, False, False, True),
        Shape(2, 1, 700, 2, 1, 128, 128), ("gqa", "dlse"), {},
    ),
    "causal": (
        WgmmaBackwardTile(64, 128, 2, 2, True, False, True, True),
        Shape(2, 500, 400, 2, 1, 96, 128), ("gqa", "causal", "sinks"), {},
    ),
    "top left": (
        WgmmaBackwardTile(128, 128, 3, 2, False, False, False, True),
        Shape(3, 140, 500, 1, 1, 64, 64), ("top_left",), {},
    ),
    "window": (
        WgmmaBackwardTile(64, 64, 2, 2, True, True, True, True),
        Shape(2, 70, 600, 1, 1, 256, 256), (), {"window": (20, 40)},
    ),
    "softcap": (
        WgmmaBackwardTile(64, 64, 2, 1, True, True, True, True),
        Shape(1, 300, 330, 2, 1, 64, 64), ("gqa", "softcap", "causal"), {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("whole_heads", [False, True])
@pytest.mark.parametrize("case", STAYING)
def test_blocks_that_stay(
    rng: Any,
    monkeypatch: pytest.MonkeyPatch,
    launched: list[str],
    case: str,
    whole_heads: bool,
) -> None:
    tile, shape, features, options = STAYING[case]
    if whole_heads:
        tile = replace(tile, direct=True, whole_heads=True)
    assert tile.complaint(*map(bucket_backward, (shape.head_dim, shape.head_dim_v))) is None
    monkeypatch.setattr(backward.tuned, "find", lambda *call: tile if "backward" in call else None)
    backward._prepare.cache_clear()
    arguments = draw(rng, shape, "bfloat16", features)
    check("wgmma", **arguments, **options)
    assert ("cupyflash_convert_wgmma" in launched) == (not whole_heads)
    backward._prepare.cache_clear()


def test_whole_heads_are_deterministic_without_turns(
    rng: Any, monkeypatch: pytest.MonkeyPatch, launched: list[str]
) -> None:
    tile = WgmmaBackwardTile(128, 128, 2, 1, False, False, True, True, True)
    monkeypatch.setattr(backward.tuned, "find", lambda *call: tile if "backward" in call else None)
    backward._prepare.cache_clear()
    arguments = draw(rng, Shape(3, 150, 260, 2, 1, 64, 64), "float16", ("gqa", "causal"))
    check("wgmma", **arguments, deterministic=True)
    assert "cupyflash_convert_wgmma" not in launched
    backward._prepare.cache_clear()


def test_queries_that_see_nothing_may_hold_anything(rng: Any) -> None:
    """With a window, the first queries see no key."""
    arguments = draw(rng, Shape(1, 200, 130, 1, 1, 64, 64), "bfloat16") | {"window": (20, 10)}
    expected = call("wgmma", **arguments)
    for name in ("q", "dout"):
        arguments[name][:, :60] = np.nan  # query i looks at key i - 70
    got = call("wgmma", **arguments)
    for name in ("dk", "dv"):
        assert same_bits(getattr(got, name), getattr(expected, name)), name
    assert same_bits(got.dq[:, 60:], expected.dq[:, 60:])
    assert not np.any(got.dq[:, :60])


def test_out_may_lie_anywhere(rng: Any, launched: list[str]) -> None:
    """The copy engine does not read it, and D is the same sum for loads of any width."""
    arguments = draw(rng, Shape(1, 70, 80, 1, 1, 64, 64), "float16", ["causal"])
    plain = call("wgmma", **arguments)
    dout, *inputs = (to_engine("wgmma", arguments[name]) for name in ("dout", "q", "k", "v"))
    out = Guarded("wgmma", plain.out.shape, plain.out.dtype, "dense", rng).view
    assert out.ctypes.data % 16 != 0
    options = {"causal": True, "engine": "wgmma", "out": out}
    _, saved = cupyflash.flash_attention_forward(*inputs, **options)
    grads = cupyflash.flash_attention_backward(dout, saved, deterministic=True)
    assert launched.count("cupyflash_backward_wgmma") == 2
    for name in ("dq", "dk", "dv"):
        assert same_bits(to_host(getattr(grads, name)), getattr(plain, name)), name
