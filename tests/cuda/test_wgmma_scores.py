"""A bias and ALiBi in Hopper's forward, and the call done again where NaN was met."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import _engines
from cupyflash._cuda import device, forward
from tests.cases import DTYPES, Shape
from tests.harness import call, check, compare, draw, expected
from tests.memory import ON_HOST, to_engine, to_host

Options = dict[str, Any]
Draw = Callable[[Any, Shape], Options]


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if "wgmma" not in ON_HOST and device.current().compute_capability != (9, 0):
        pytest.skip("wgmma is Hopper's")


def bias_of(
    rng: Any, shape: Shape, dtype: str, batch: int = 1, heads: int | None = None, gap: int = 0
) -> np.ndarray:
    """A bias of 16 bits whose rows lie at multiples of 16 bytes, `gap` elements apart."""
    rows = -(-(shape.seqlen_k + gap) // 8) * 8
    lengths = batch, heads or shape.heads, shape.seqlen_q, rows
    return rng.normal(size=lengths).astype(DTYPES[dtype])[..., : shape.seqlen_k]


def plain(dtype: str, **sizes: int) -> Draw:
    return lambda rng, shape: {"bias": bias_of(rng, shape, dtype, **sizes)}


def hiding(dtype: str, where: Callable[[np.ndarray], None], **sizes: int) -> Draw:
    """-inf `where`, which no row may be the worse for."""

    def draw_options(rng: Any, shape: Shape) -> Options:
        bias = bias_of(rng, shape, dtype, **sizes)
        where(bias)
        return {"bias": bias}

    return draw_options


def some(bias: np.ndarray) -> None:
    """Elements, all of a row, keys of all rows."""
    bias[..., 3::7] = bias[..., 5, :] = bias[..., -1, :] = -np.inf


def first_tiles(bias: np.ndarray) -> None:
    """Key tiles come from right to left: the first ones, of other rows the last ones."""
    bias[..., ::2, -140:] = bias[..., 1::2, :140] = -np.inf


def large(bias: np.ndarray) -> None:
    """As calls have it that write finite numbers where keys are to be hidden."""
    lowest = ml_dtypes.finfo(bias.dtype).min
    bias[..., 100:], bias[..., 7, :], bias[..., 9, :] = -1e4, lowest, 1e4


def slopes(*lengths: int) -> Draw:
    return lambda rng, shape: {"alibi_slopes": rng.uniform(0, 0.5, lengths).astype(np.float32)}


def both(*draws: Draw) -> Draw:
    return lambda rng, shape: {name: x for each in draws for name, x in each(rng, shape).items()}


# Shape, dtype of q, k and v, features, options. Lengths of one tile and of several, ragged ones.
CASES: dict[str, tuple[Shape, str, tuple[str, ...], Draw]] = {
    "full": (Shape(2, 140, 176, 2, 2, 128, 128), "bfloat16", ("dlse",), plain("bfloat16")),
    "one tile": (Shape(1, 30, 24, 1, 1, 128, 128), "float16", (), plain("bfloat16")),
    "one row": (Shape(2, 1, 200, 2, 2, 64, 64), "bfloat16", (), plain("float16")),
    "narrow": (Shape(1, 400, 264, 2, 2, 64, 64), "float16", (), plain("float16")),
    "narrow short": (Shape(1, 120, 392, 2, 2, 40, 64), "float16", (), plain("float16")),
    "of sequences": (
        Shape(3, 150, 208, 4, 2, 64, 64), "bfloat16", ("gqa", "sinks"),
        plain("bfloat16", batch=3, heads=1),
    ),
    "of each": (
        Shape(2, 200, 136, 4, 2, 96, 128), "float16", ("gqa",), plain("float16", batch=2)
    ),
    "of all": (Shape(2, 130, 264, 2, 2, 128, 72), "bfloat16", (), plain("float16", heads=1)),
    "padded rows": (Shape(1, 150, 203, 2, 2, 128, 128), "float16", (), plain("float16", gap=11)),
    "causal": (
        Shape(2, 300, 400, 4, 2, 128, 128), "bfloat16", ("causal", "gqa"), plain("bfloat16")
    ),
    "causal narrow": (Shape(1, 500, 440, 2, 2, 64, 64), "float16", ("causal",), plain("float16")),
    "top left": (
        Shape(1, 390, 150, 2, 2, 64, 64), "float16", ("top_left",), plain("float16", gap=2)
    ),
    "window": (
        Shape(2, 330, 480, 2, 2, 128, 128), "bfloat16", (),
        both(plain("bfloat16"), lambda rng, shape: {"window": (90, 37)}),
    ),
    "window to the left": (
        Shape(1, 260, 520, 2, 2, 64, 64), "float16", (),
        both(plain("float16"), lambda rng, shape: {"window": (75, None)}),
    ),
    "window of many tiles": (
        Shape(1, 700, 800, 1, 1, 32, 32), "float16", (),
        both(plain("float16"), lambda rng, shape: {"window": (150, 3)}),
    ),
    "wide": (Shape(1, 140, 200, 2, 1, 192, 192), "float16", ("gqa", "causal"), plain("float16")),
    "widest": (Shape(1, 140, 136, 2, 2, 256, 256), "bfloat16", (), plain("bfloat16")),
    "softcap": (Shape(1, 150, 200, 2, 2, 64, 64), "float16", ("softcap",), plain("float16")),
    "large softcap": (
        Shape(1, 150, 200, 2, 2, 128, 128), "bfloat16", ("causal",),
        both(plain("float16"), lambda rng, shape: {"softcap": 100.0}),
    ),
    "hidden": (Shape(2, 150, 272, 2, 2, 128, 128), "float16", ("dlse",), hiding("float16", some)),
    "hidden sinks": (
        Shape(1, 150, 272, 2, 2, 64, 64), "bfloat16", ("sinks", "causal"), hiding("float16", some)
    ),
    "hidden tiles": (
        Shape(1, 150, 280, 2, 2, 128, 128), "bfloat16", (), hiding("bfloat16", first_tiles)
    ),
    "large": (Shape(1, 150, 272, 2, 2, 128, 128), "bfloat16", (), hiding("bfloat16", large)),
    "large narrow": (Shape(1, 200, 272, 2, 2, 64, 64), "float16", (), hiding("float16", large)),
    "alibi": (Shape(2, 150, 330, 4, 2, 128, 128), "bfloat16", ("gqa",), slopes(4)),
    "alibi narrow": (Shape(2, 400, 330, 2, 2, 64, 64), "float16", ("causal", "dlse"), slopes(2)),
    "alibi of each": (
        Shape(2, 300, 200, 2, 2, 128, 128), "float16", ("causal", "sinks"), slopes(2, 2)
    ),
    "alibi softcap": (Shape(1, 150, 200, 2, 2, 64, 64), "bfloat16", ("softcap",), slopes(2)),
    "alibi window": (
        Shape(1, 300, 420, 2, 2, 256, 256), "bfloat16", (),
        both(slopes(1, 2), lambda rng, shape: {"window": (60, 20)}),
    ),
    "alibi scale": (
        Shape(1, 150, 200, 2, 2, 64, 64), "float16", (),
        both(slopes(2), lambda rng, shape: {"softmax_scale": -0.1}),
    ),
    "bias alibi": (
        Shape(2, 150, 272, 2, 2, 128, 128), "bfloat16", ("causal", "softcap"),
        both(slopes(2, 2), hiding("float16", some, batch=2)),
    ),
}  # fmt: skip


def suspects_of(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the warps of first kernels say from now on."""
    kept: list[Any] = []
    allocate = forward.allocate

    def spy(sizes: Any) -> Any:
        arrays = allocate(sizes)
        kept.extend(arrays.values())
        return arrays

    monkeypatch.setattr(forward, "allocate", spy)
    return kept


@pytest.mark.parametrize("case", CASES)
def test_scores(rng: Any, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """And nothing is done again."""
    shape, dtype, features, options = CASES[case]
    arguments = draw(rng, shape, dtype, features) | options(rng, shape)
    if "dlse" not in features:
        del arguments["dout"]
    said = suspects_of(monkeypatch)
    check("wgmma", **arguments)
    assert len(said) == ("bias" in arguments)
    assert not any(to_host(each).any() for each in said)


@pytest.mark.parametrize("window", [{}, {"causal": True}, {"window": (90, 40)}], ids=str)
def test_keys_that_a_bias_hides_may_hold_anything(rng: Any, window: Options) -> None:
    """The first kernel computes NaN there; the second one is done with all of it."""
    shape = Shape(2, 150, 272, 2, 2, 64, 64)
    arguments = draw(rng, shape, "bfloat16", ())
    del arguments["dout"]
    bias = bias_of(rng, shape, "bfloat16")
    hidden = np.arange(272) % 5 == 2
    hidden[130:270] = True
    bias[..., hidden] = -np.inf
    dirty = dict(arguments)
    for name, values in (("k", (np.nan, np.inf)), ("v", (-np.inf, np.nan))):
        dirty[name] = arguments[name].copy()
        dirty[name][:, hidden] = rng.choice(values, (int(hidden.sum()), 1, 1))
    result = call("wgmma", bias=bias, **dirty, **window)
    clean = arguments | {"bias": bias} | window
    compare(result, expected(**clean), **clean)


@pytest.mark.parametrize("window", [{"causal": True}, {"window": (20, 10)}], ids=str)
def test_keys_that_a_band_hides_may_hold_anything(rng: Any, window: Options) -> None:
    """NaN in a key tile that the query tile sees, but beyond what it sees of it."""
    shape = Shape(1, 400, 400, 1, 1, 64, 64)
    arguments = draw(rng, shape, "float16", ())
    del arguments["dout"]
    arguments["bias"] = bias_of(rng, shape, "float16")
    dirty = dict(arguments) | {"v": arguments["v"].copy()}
    dirty["v"][:, 205:] = np.nan
    clean = call("wgmma", **arguments, **window)
    result = call("wgmma", **dirty, **window)
    np.testing.assert_allclose(  # by the other engine
        result.out[:, :100].astype(float), clean.out[:, :100].astype(float), atol=2e-3
    )


@pytest.mark.parametrize("hide", [lambda bias: None, some, first_tiles, large])
@pytest.mark.parametrize("shape", [(1, 30, 64, 1, 1), (2, 500, 264, 3, 3)], ids=str)
def test_nothing_is_done_again_without_nan(
    rng: Any,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    hide: Callable[[np.ndarray], None],
) -> None:
    call_shape = Shape(*shape, 128, 128)
    arguments = draw(rng, call_shape, "bfloat16", ())
    del arguments["dout"]
    options = hiding("bfloat16", hide)(rng, call_shape)
    said = suspects_of(monkeypatch)
    call("wgmma", **arguments, **options)
    (suspects,) = map(to_host, said)
    assert suspects.size % 8 == 0 and not suspects.any()


@pytest.mark.parametrize("row", [0, 70, 129])
def test_one_nan_is_enough(rng: Any, monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    shape = Shape(2, 130, 264, 3, 3, 128, 128)
    arguments = draw(rng, shape, "bfloat16", ())
    del arguments["dout"]
    arguments["q"][1, row, 2, 5] = np.nan
    said = suspects_of(monkeypatch)
    call("wgmma", **arguments, bias=bias_of(rng, shape, "float16"))
    (suspects,) = map(to_host, said)
    assert (suspects == 1).sum() == 1 and (suspects == 0).sum() == suspects.size - 1


def test_who_serves_a_bias(rng: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper's forward whatever its copy engine reads, mma all else."""
    if "wgmma" in ON_HOST:
        pytest.skip("host arrays are NumPy's unless an engine is named")
    served: list[str] = []
    original = _engines.forward

    def forward_of(engine: str) -> Any:
        served.append(engine)
        return original(engine)

    monkeypatch.setattr(_engines, "forward", forward_of)
    shape = Shape(2, 100, 136, 2, 2, 64, 64)
    q, k, v = (to_engine("wgmma", draw(rng, shape, "bfloat16")[name]) for name in "qkv")
    bias = bias_of(rng, shape, "bfloat16", batch=2)
    for given, engine in (
        (bias, "wgmma"),
        (bias[:1], "wgmma"),
        (bias.astype(np.float16)[:, :1], "wgmma"),
        (bias.astype(np.float32), "mma"),
        (bias[:, :, :1], "mma"),
        (bias[..., :1], "mma"),
        (bias[:, :, ::-1], "mma"),
    ):
        cupyflash.flash_attention(q, k, v, bias=to_engine("wgmma", given))
        assert served.pop() == engine
        if engine == "mma":
            with pytest.raises(cupyflash.UnsupportedError, match="copy engine"):
                cupyflash.flash_attention(q, k, v, bias=to_engine("wgmma", given), engine="wgmma")
    cupyflash.flash_attention(q, k, v, alibi_slopes=to_engine("wgmma", np.ones(2, np.float32)))
    assert served.pop() == "wgmma"


def test_a_cuda_graph_holds_both_kernels(rng: Any) -> None:
    """Captured without NaN, replayed with it, and without it again."""
    if "wgmma" in ON_HOST:
        pytest.skip("graphs are of a GPU")
    import cupy

    shape = Shape(2, 150, 272, 2, 2, 64, 64)
    drawn = draw(rng, shape, "float16", ())
    q, k, v = (to_engine("wgmma", drawn[name]) for name in "qkv")
    bias = to_engine("wgmma", bias_of(rng, shape, "float16"))
    bias[..., 100:110] = -np.inf
    clean = v.copy()

    def run() -> Any:
        return cupyflash.flash_attention(q, k, v, bias=bias, engine="wgmma")

    def dirty() -> None:
        v[:, 100:110] = np.nan

    right = [to_host(run())]
    dirty()
    right.append(to_host(run()))
    v[...] = clean
    assert np.isfinite(right[1]).all()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        cupy.cuda.Device().synchronize()
        run()  # the warm-up
        stream.begin_capture()
        out = run()
        graph = stream.end_capture()
        for number in (0, 1, 0):
            v[...] = clean
            if number:
                dirty()
            out.fill(0)
            graph.launch(stream)
            stream.synchronize()
            assert to_host(out).tobytes() == right[number].tobytes()
