"""Running one call on one engine under hostile conditions, and judging what comes back."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from tests import cases, reference
from tests.memory import poisoned, to_engine, to_host
from tests.tolerance import assert_result

Array = Any


# --- one call -----------------------------------------------------------------------------------


class Result(NamedTuple):
    """Everything that came back, on the host."""

    out: Array
    row_max: Array
    row_sum: Array
    lse: Array
    dq: Array = None
    dk: Array = None
    dv: Array = None
    dbias: Array = None
    dsinks: Array = None
    dscore_params: Any = None


def features_of(q: Array, k: Array, layout: str, dlse: Any, cu_seqlens: Any, options: Any) -> set:
    """The names in cases.FEATURES that a call needs."""
    axis = -2 if layout == "bshd" else -3
    needs = {
        "gqa": q.shape[axis] != k.shape[axis],
        "dlse": dlse is not None,
        "varlen": cu_seqlens is not None,
        "top_left": options.get("causal") == "top-left",
        "causal": options.get("causal") in (True, "bottom-right"),
        "alibi": options.get("alibi_slopes") is not None,
        "dropout": options.get("dropout_p", 0) > 0,
        "softcap": bool(options.get("softcap")),
    }
    for name in ("window", "mask", "block_mask", "bias", "sinks", "score_mod"):
        needs[name] = options.get(name) is not None
    return {name for name, needed in needs.items() if needed}


def require(engine: str, *features: str) -> None:
    """Skip the test if the table says that the engine does not serve one of the features."""
    missing = set(features) - cases.SUPPORTED[engine]
    if missing:
        pytest.skip(f"engine {engine!r} does not serve: {', '.join(sorted(missing))}")


def require_float8(engine: str) -> None:
    """Skip the test if the engine does not serve FP8 inputs."""
    if engine not in cases.FLOAT8_ENGINES:
        pytest.skip(f"engine {engine!r} does not serve FP8")


def call(
    engine: str,
    q: Array,
    k: Array,
    v: Array,
    *,
    dout: Array = None,
    dlse: Array = None,
    deterministic: bool = True,
    cu_seqlens: Any = None,
    layout: str = "bshd",
    **options: Any,
) -> Result:
    """Forward, and with `dout` backward, of host arrays on an engine; checks shapes and dtypes.

    Deterministic, as many tests compare bits; `check` takes the API's default instead.
    """
    require(engine, *features_of(q, k, layout, dlse, cu_seqlens, options))
    arrays = [to_engine(engine, x) for x in (q, k, v)]
    placed = {name: to_engine(engine, value) for name, value in options.items()}
    placed["layout"] = layout
    placed["engine"] = named(engine, arrays, placed, varlen=cu_seqlens is not None)
    with poisoned(engine):
        if cu_seqlens is None:
            out, saved = cupyflash.flash_attention_forward(*arrays, **placed)
        else:
            cu_seqlens = (to_engine(engine, cu) for cu in cu_seqlens)
            out, saved = cupyflash.flash_attention_varlen_forward(*arrays, *cu_seqlens, **placed)
        statistics = saved.row_max, saved.row_sum, saved.lse
        results = [to_host(x) for x in (out, *statistics)]
        if dout is not None:
            dout, dlse = to_engine(engine, dout), to_engine(engine, dlse)
            grads = cupyflash.flash_attention_backward(
                dout, saved, dlse=dlse, deterministic=deterministic
            )
            results += [to_host(x) for x in grads]
    result = Result(*results)
    _assert_forms(result, q, k, v, layout, options)
    return result


def _assert_forms(result: Result, q: Array, k: Array, v: Array, layout: str, options: Any) -> None:
    default = ml_dtypes.bfloat16 if q.dtype == cases.FLOAT8 else q.dtype
    out_dtype = np.dtype(options.get("out_dtype") or default)
    expected = {"out": ((*q.shape[:-1], v.shape[-1]), out_dtype)}
    statistics = q.shape[:-1] if layout == "bhsd" else (*q.shape[:-3], q.shape[-2], q.shape[-3])
    wide = np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
    expected |= dict.fromkeys(("row_max", "row_sum", "lse"), (statistics, wide))
    if result.dq is not None:
        bias, sinks = options.get("bias"), options.get("sinks")
        expected |= {"dq": (q.shape, q.dtype), "dk": (k.shape, k.dtype), "dv": (v.shape, v.dtype)}
        expected |= {"dbias": None if bias is None else (bias.shape, bias.dtype)}
        expected |= {"dsinks": None if sinks is None else (sinks.shape, sinks.dtype)}
    for name, form in expected.items():
        got = getattr(result, name)
        got_form = None if got is None else (got.shape, got.dtype)
        assert got_form == form, f"{name}: {got_form}, expected {form}"


# --- against the reference ----------------------------------------------------------------------


def draw(
    rng: Any, shape: cases.Shape, dtype: str = "float32", features: Any = (), layout: str = "bshd"
) -> dict[str, Any]:
    """Arguments of `call`: arrays from a standard normal distribution and the features' options."""
    if "gqa" in features:
        shape = shape._replace(heads_kv=shape.heads // 2)
    else:
        shape = shape._replace(heads_kv=shape.heads)
    options: dict[str, Any] = {}
    lead_q: tuple[int, ...] = (shape.batch, shape.seqlen_q)
    lead_k: tuple[int, ...] = (shape.batch, shape.seqlen_k)
    if "varlen" in features:
        options["cu_seqlens"] = tuple(
            _cumulative(rng, shape.batch, longest) for longest in (shape.seqlen_q, shape.seqlen_k)
        )
        lead_q, lead_k = ((int(cu[-1]),) for cu in options["cu_seqlens"])
    for feature in features:
        options |= cases.FEATURES[feature](rng, shape)

    def normal(lead: tuple[int, ...], heads: int, width: int) -> Array:
        x = rng.normal(size=(*lead, heads, width)).astype(cases.DTYPES[dtype])
        return np.ascontiguousarray(x.swapaxes(-3, -2)) if layout == "bhsd" else x

    options |= {
        "q": normal(lead_q, shape.heads, shape.head_dim),
        "k": normal(lead_k, shape.heads_kv, shape.head_dim),
        "v": normal(lead_k, shape.heads_kv, shape.head_dim_v),
        "dout": normal(lead_q, shape.heads, shape.head_dim_v),
        "layout": layout,
    }
    if "dlse" in features:
        statistics = (*lead_q[:-1], shape.heads, lead_q[-1])
        wide = np.float64 if dtype == "float64" else np.float32
        options["dlse"] = rng.normal(size=statistics).astype(wide)
    return options


def _cumulative(rng: Any, batch: int, longest: int) -> Array:
    """cu_seqlens with one longest entry and, mostly, an empty one."""
    lengths = rng.integers(0, longest + 1, batch)
    if batch:
        lengths[rng.integers(batch)] = 0
        lengths[rng.integers(batch)] = longest
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def check(
    engine: str, yardstick: Any = None, on: str = "numpy", **arguments: Any
) -> tuple[Result, reference.Dense]:
    """`call`, and every result compared with the dense reference; see `compare`."""
    result = call(engine, **({"deterministic": False} | arguments))
    exact = expected(on=on, **arguments)
    compare(result, exact, yardstick, on, **arguments)
    return result, exact


def compare(
    result: Result,
    exact: reference.Dense,
    yardstick: Any = None,
    on: str = "numpy",
    **arguments: Any,
) -> None:
    """Assert that each part of `result` is close to its part of `exact`.

    The tolerance is that of the dense formula in dtype `yardstick`, by default the inputs' own;
    the statistics are held to float32's.
    """
    dtype = yardstick or arguments["q"].dtype
    dense = expected(dtype=dtype, on=on, **arguments)
    wide = dense if dtype.itemsize >= 4 else expected(dtype=np.float32, on=on, **arguments)
    for name in ("row_max", "row_sum", "lse"):
        assert_result(name, getattr(result, name), exact, wide)
    for name in ("out", "dq", "dk", "dv", "dbias", "dsinks"):
        if getattr(result, name) is not None:
            assert_result(name, getattr(result, name), exact, dense)


def expected(
    *,
    q: Array,
    k: Array,
    v: Array,
    dout: Array = None,
    dlse: Array = None,
    layout: str = "bshd",
    cu_seqlens: Any = None,
    score_mod: Any = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    dtype: Any = None,
    deterministic: bool = False,
    tiling: Any = None,
    out: Any = None,
    on: str = "numpy",
    **options: Any,
) -> reference.Dense:
    """The dense formula for the arguments of `call`, in float64 (wider for float64) or `dtype`.

    `on` a GPU engine it is CuPy that computes it, for shapes too large for the host.
    """
    del deterministic, tiling, out  # have no bearing on the values
    dtype = dtype or (np.longdouble if q.dtype == np.float64 else np.float64)
    heads_first, unbatched = layout == "bhsd", q.ndim == 3 and cu_seqlens is None

    def canonical(x: Array) -> Array:
        if x is None:
            return None
        x = x.swapaxes(-3, -2) if heads_first else x
        return x[None] if unbatched else x

    q, k, v, dout = map(canonical, (q, k, v, dout))
    options |= {"dtype": dtype, "dropout_p": dropout_p, "dout": dout}
    options["dlse"] = dlse[None] if unbatched and dlse is not None else dlse
    if score_mod is not None:
        options["score_mod"] = score_mod.numpy_forward, score_mod.numpy_backward
    if cu_seqlens is None:
        if dropout_p:
            shape = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
            options["keep"] = reference.dropout_keep(seed, dropout_p, shape)
        options = {name: to_engine(on, value) for name, value in options.items()}
        dense = reference.attention(*(to_engine(on, x) for x in (q, k, v)), **options)
        dense = reference.Dense(*map(to_host, dense))
    else:
        if dropout_p:
            lengths = enumerate(zip(*map(np.diff, cu_seqlens), strict=True))
            options["keep"] = [
                reference.dropout_keep(seed, dropout_p, (1, q.shape[1], *map(int, pair)), entry)
                for entry, pair in lengths
            ]
        dense = reference.attention_varlen(q, k, v, *cu_seqlens, **options)

    def users(name: str, x: Array) -> Array:
        if x is None or name in ("dbias", "dsinks", "dscores", "noise"):
            return x
        x = x[0] if unbatched else x
        rows_first = name in ("out", "dq", "dk", "dv")
        return x.swapaxes(-3, -2) if heads_first and rows_first else x

    return reference.Dense(*(users(n, x) for n, x in zip(dense._fields, dense, strict=True)))


def same_bits(a: Array, b: Array) -> bool:
    """Whether two arrays hold the same bytes."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


# The copy engine of wgmma reads no unaligned, broadcast or reversed arrays: mma takes over, unless
# wgmma was named.
DEPUTIES = {"wgmma": ("mma",)}


def named(engine: str, arrays: Any, options: dict[str, Any], varlen: bool = False) -> str | None:
    """`engine`, or None where it cannot read the arrays and leaves them to its deputy."""
    if engine in DEPUTIES:
        if varlen:  # whose entries have options of their own
            if options.get("bias") is not None:
                return None
            options = {"layout": options["layout"]}
        try:
            cupyflash.choose_tiling(*arrays, **options, engine=engine)
        except cupyflash.UnsupportedError as error:
            if "copy engine" in str(error):
                return None
    return engine


def assert_bits(engine: str, got: dict[str, Array], **arguments: Any) -> None:
    """Assert that `got` is what `engine` makes of `arguments`, or an engine that took over."""
    differing = []
    for serving in (engine, *DEPUTIES.get(engine, ())):
        right = call(serving, deterministic=True, **arguments)
        differing.append(
            [name for name, array in got.items() if not same_bits(array, getattr(right, name))]
        )
    assert [] in differing, differing
