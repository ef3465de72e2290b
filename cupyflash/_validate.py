"""From the caller's arguments to a `Call`: every check happens here, before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash import _options
from cupyflash._arrays import (
    BFLOAT16,
    DTYPES_BY_NAME,
    FLOAT_DTYPES,
    HOST,
    Place,
    as_array,
    as_operand,
    contiguous_last_axis,
    describe,
    is_cupy,
    is_float8,
    memory_overlaps,
    overlaps_itself,
    place_of,
    require_place,
)
from cupyflash._cuda.score_source import ScoreSource
from cupyflash._descale import descales, out_dtype
from cupyflash._extras import ScoreShape, mask_shape, optional_operands
from cupyflash._float8 import FLOAT8
from cupyflash._layout import Layout
from cupyflash._options import Options
from cupyflash._problem import Operands, Problem
from cupyflash.errors import UnsupportedError
from cupyflash.score_mod import ScoreMod

Array = Any

MAX_HEAD_DIM = 256
CACHED_AS_FLOAT8 = (np.dtype(np.float16), BFLOAT16)  # dtypes of q that go with an FP8 cache


@dataclass(frozen=True, eq=False)
class Sequences:
    """The arguments that make a call varlen."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None
    of_cache: bool = False  # k and v may be FP8 where q is 16-bit


@dataclass(frozen=True, eq=False)
class Call:
    """One checked call: what is asked, its arrays, and how the caller's axes run."""

    problem: Problem
    operands: Operands
    layout: Layout
    place: Place
    options: Options  # as given, but with the seed that will be used
    arrays: tuple[Array, Array, Array]  # q, k, v in the caller's axes
    out: Array | None  # the caller's own object


def bind(
    q: Any, k: Any, v: Any, options: Options, *, out: Any = None, sequences: Sequences | None = None
) -> Call:
    """Check one forward call.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, NoDeviceError
        See section "Errors" of the documentation; nothing has been written by then.
    """
    query, key, value = arrays = as_operand(q, "q"), as_operand(k, "k"), as_operand(v, "v")
    place = place_of(query)
    for name, array in (("k", key), ("v", value)):
        require_place(array, name, place)
    of_cache = sequences is not None and sequences.of_cache
    dtype, kv_dtype = _dtypes(query, key, value, of_cache=of_cache)
    layout = _layout(query, key, value, options, varlen=sequences is not None)
    query, key, value = (contiguous_last_axis(layout.canonical(x)) for x in (query, key, value))
    _require_shapes(query, key, value, layout)
    num_heads, head_dim = query.shape[-2:]
    cu_seqlens = _cu_seqlens(sequences, query.shape[0], key.shape[0], place)
    batch = query.shape[0] if cu_seqlens is None else len(cu_seqlens[0]) - 1
    seqlen_q, seqlen_k = query.shape[-3], key.shape[-3]
    causal, top_left = _options.alignment(options.causal)
    left, right = _options.window(options.window, reach=seqlen_q + seqlen_k)
    longest = _longest(cu_seqlens, seqlen_q, seqlen_k)
    scores = ScoreShape(batch, num_heads, *longest, varlen=cu_seqlens is not None)
    extras = optional_operands(options, scores, place)
    dropout_p = _options.dropout_p(options.dropout_p)
    seed = _seed(options.seed, place, needed=dropout_p > 0)
    _options.engine(options.engine)
    _options.tiling(options.tiling)
    largest = float(np.finfo("float64" if dtype == "float64" else "float32").max)
    are_float8 = is_float8(query), is_float8(key), is_float8(value)
    factors = descales(options, batch, key.shape[-2], place, are_float8)
    scale = _options.softmax_scale(options.softmax_scale, head_dim, largest)
    scale *= factors.numbers[0] * factors.numbers[1]
    cu_seqlens_q, cu_seqlens_k = cu_seqlens or (None, None)
    query_descale, key_descale, value_descale = factors.arrays
    operands = Operands(
        query=query,
        key=key,
        value=value,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        cu_seqlens_checked=sequences is None or _on_host(sequences),
        query_descale=query_descale,
        key_descale=key_descale,
        value_descale=value_descale,
        seed=0 if seed is None else seed,
        **extras,
    )
    bias = operands.bias
    problem = Problem(
        dtype=dtype,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads=num_heads,
        num_heads_kv=key.shape[-2],
        head_dim=head_dim,
        head_dim_v=value.shape[-1],
        softmax_scale=max(-largest, min(scale, largest)),
        window_left=left,
        window_right=0 if causal else right,
        top_left=top_left,
        softcap=_options.softcap(options.softcap, largest),
        dropout_p=dropout_p,
        varlen=cu_seqlens is not None,
        extras=frozenset(extras),
        masks=sum(mask is not None for mask in operands.masks),
        bias_dtype=None if bias is None else FLOAT_DTYPES[bias.dtype],
        bias_shape=() if bias is None else tuple(bias.shape),
        mask_shape=mask_shape(operands, scores),
        score_mod=_score_source(operands.score_mod, place),
        out_dtype=out_dtype(options.out_dtype, query.dtype, is_float8=is_float8(key)),
        kv_dtype=None if kv_dtype == dtype else kv_dtype,
        key_scale=factors.numbers[1],
        value_scale=factors.numbers[2],
    )
    if out is not None:
        shape = layout.users_shape((*query.shape[:-1], value.shape[-1]))
        inputs = dict(zip(("q", "k", "v"), arrays, strict=True)) | dict(_operand_arrays(operands))
        _require_out(out, shape, DTYPES_BY_NAME[problem.output_dtype], place, inputs)
    return Call(problem, operands, layout, place, options._replace(seed=seed), arrays, out)


def bind_gradient(x: Any, name: str, expected: Array, place: Place, dtype: Any) -> Array:
    """Check ``dout`` or ``dlse`` against the array that it is the gradient of."""
    gradient = as_array(x, name)
    require_place(gradient, name, place)
    if gradient.dtype != dtype:
        raise TypeError(f"{name} must have dtype {dtype}, got {describe(gradient)}; use .astype")
    if gradient.shape != expected.shape:
        raise ValueError(
            f"{name} must have shape {tuple(expected.shape)}, got {describe(gradient)}"
        )
    return gradient


def require_backward(call: Call) -> None:
    """Check that the call has gradients where its arrays live."""
    if call.problem.is_float8:
        raise UnsupportedError(
            "FP8 calls have no backward; save a forward call in float16 or bfloat16 for that"
        )
    score_mod = call.operands.score_mod
    if score_mod is not None and call.place == HOST and score_mod.numpy_backward is None:
        raise UnsupportedError(
            "score_mod has no numpy_backward, so its call has no gradients on the host; "
            "give ScoreMod(..., numpy_backward=...)"
        )


# --- q, k, v ------------------------------------------------------------------------------------


def _dtypes(query: Array, key: Array, value: Array, *, of_cache: bool) -> tuple[str, str]:
    """Return the names of q's dtype, and of that of k and v."""
    mixed = of_cache and is_float8(key) and query.dtype in CACHED_AS_FLOAT8
    for name, array in (("q", query), ("k", key), ("v", value)):
        dtype = array.dtype
        usable = is_float8(array) or (dtype in FLOAT_DTYPES and dtype.isnative)
        if not usable:
            raise _unusable_dtype(name, array)
        if dtype != (key if mixed and name != "q" else query).dtype:
            raise TypeError(
                f"q, k and v must have one dtype, got q {query.dtype} and {name} {dtype}; "
                "use .astype"
            )
    query_dtype, key_dtype = (
        FLOAT8.name if is_float8(x) else FLOAT_DTYPES[x.dtype] for x in (query, key)
    )
    return query_dtype, key_dtype


def _unusable_dtype(name: str, array: Array) -> Exception:
    dtype = array.dtype
    supported = ", ".join((*FLOAT_DTYPES.values(), FLOAT8.name))
    if dtype.name.startswith("float8"):
        return UnsupportedError(
            f"{name} has dtype {dtype}: no engine computes in this format; supported: {supported}"
        )
    if dtype == np.uint8 and not is_cupy(array):
        return TypeError(
            f"{name} has dtype uint8, which is FP8 on a GPU only; "
            "use .view(ml_dtypes.float8_e4m3fn)"
        )
    return TypeError(
        f"{name} has dtype {dtype}; expected one of {supported} in native byte order "
        "(bfloat16 is ml_dtypes.bfloat16); use .astype"
    )


def _layout(query: Array, key: Array, value: Array, options: Options, *, varlen: bool) -> Layout:
    heads_first = _options.layout(options.layout) == "bhsd"
    allowed = (3,) if varlen else (3, 4)
    for name, array in (("q", query), ("k", key), ("v", value)):
        if array.ndim not in allowed or array.ndim != query.ndim:
            axes = "(total, heads, head_dim)" if varlen else "(batch, seqlen, heads, head_dim)"
            raise ValueError(
                f"{name} must have {' or '.join(map(str, allowed))} axes, {axes}, as many as q; "
                f"got {describe(array)} (q: {describe(query)})"
            )
    return Layout(heads_first, unbatched=not varlen and query.ndim == 3, varlen=varlen)


def _require_shapes(query: Array, key: Array, value: Array, layout: Layout) -> None:
    *_, num_heads, head_dim = query.shape
    num_heads_kv, head_dim_v = key.shape[-2], value.shape[-1]
    for name, width in (("q", head_dim), ("v", head_dim_v)):
        if width == 0:
            raise ValueError(f"{name} has head_dim 0; expected 1 to {MAX_HEAD_DIM}")
        if width > MAX_HEAD_DIM:
            raise UnsupportedError(
                f"{name} has head_dim {width}; supported: 1 to {MAX_HEAD_DIM} "
                "(is layout= the one of these arrays?)"
            )
    if not is_grouped(num_heads, num_heads_kv):
        hint = ""
        if is_grouped(query.shape[-3], key.shape[-3]):
            other = "bshd" if layout.heads_first else "bhsd"
            hint = f"; with layout={other!r} they have {query.shape[-3]} and {key.shape[-3]} heads"
        raise ValueError(
            f"q's {num_heads} heads must be a positive multiple of k's {num_heads_kv} heads "
            f"(q {_users_shape(query, layout)}, k {_users_shape(key, layout)}{hint})"
        )
    lead = () if layout.varlen else query.shape[:1]
    expected_key = (*lead, key.shape[-3], num_heads_kv, head_dim)
    expected_value = (*lead, key.shape[-3], num_heads_kv, head_dim_v)
    for name, array, expected in (("k", key, expected_key), ("v", value, expected_value)):
        if array.shape != expected:
            raise ValueError(
                f"{name} has shape {_users_shape(array, layout)}, "
                f"expected {layout.users_shape(expected)} "
                f"to go with q {_users_shape(query, layout)} and k {_users_shape(key, layout)}"
            )


def is_grouped(num_heads: int, num_heads_kv: int) -> bool:
    """Whether every key-value head serves the same number of query heads."""
    return num_heads > 0 and num_heads_kv > 0 and num_heads % num_heads_kv == 0


def _users_shape(canonical: Array, layout: Layout) -> tuple[int, ...]:
    return layout.users_shape(tuple(canonical.shape))


def _score_source(score_mod: ScoreMod | None, place: Place) -> ScoreSource | None:
    return None if score_mod is None or place == HOST else ScoreSource.of(score_mod)


# --- varlen -------------------------------------------------------------------------------------


def _cu_seqlens(
    sequences: Sequences | None, total_q: int, total_k: int, place: Place
) -> tuple[Array, Array] | None:
    if sequences is None:
        return None
    for name in ("max_seqlen_q", "max_seqlen_k"):
        hint = getattr(sequences, name)
        if hint is not None:
            _options.integer(hint, name)
    checked = tuple(
        _cumulative(getattr(sequences, name), name, total)
        for name, total in (("cu_seqlens_q", total_q), ("cu_seqlens_k", total_k))
    )
    if len(checked[0]) != len(checked[1]):
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must have the same length (batch + 1), "
            f"got {len(checked[0])} and {len(checked[1])}"
        )
    return _moved(checked[0], place), _moved(checked[1], place)


def _on_host(sequences: Sequences) -> bool:
    ends = (sequences.cu_seqlens_q, sequences.cu_seqlens_k)
    return all(place_of(as_array(x, "cu_seqlens")) == HOST for x in ends)


def _cumulative(x: Any, name: str, total: int) -> Array:
    array = as_array(x, name)
    if array.dtype != np.int32:
        raise TypeError(
            f"{name} must have dtype int32, got {describe(array)}; use .astype('int32')"
        )
    if array.ndim != 1 or array.shape[0] == 0:
        raise ValueError(f"{name} must have shape (batch + 1,), got {describe(array)}")
    if place_of(array) == HOST:  # device values are never read by the host
        array = array.copy()  # the backward reads it again, whatever becomes of the caller's
        if array[0] != 0 or (array[1:] < array[:-1]).any():
            raise ValueError(f"{name} must start at 0 and never decrease, got {array}")
        if array[-1] > total:
            raise ValueError(f"{name} ends at {array[-1]}, beyond the {total} tokens of its array")
    return array


def _moved(array: Array, place: Place) -> Array:
    if place == place_of(array):
        return array
    if place == HOST:
        return array.get()
    with place.namespace.cuda.Device(place.device_id):
        return place.namespace.asarray(array)


def _longest(
    cu_seqlens: tuple[Array, Array] | None, seqlen_q: int, seqlen_k: int
) -> tuple[int | None, int | None]:
    """Longest sequences; None where only the device knows."""
    if cu_seqlens is None:
        return seqlen_q, seqlen_k
    if place_of(cu_seqlens[0]) != HOST or len(cu_seqlens[0]) == 1:
        return None, None
    return int(np.diff(cu_seqlens[0]).max()), int(np.diff(cu_seqlens[1]).max())


# --- seed ----------------------------------------------------------------------------------------


def _seed(x: Any, place: Place, *, needed: bool) -> Any:
    if place == HOST or not hasattr(x, "dtype") or not getattr(x, "shape", None):
        return _options.seed(x, needed)
    seed = as_array(x, "seed")
    require_place(seed, "seed", place)
    if seed.dtype != np.uint64 or seed.size != 1:
        raise TypeError(f"a device seed must be one uint64, got {describe(seed)}")
    return seed


# --- out ----------------------------------------------------------------------------------------


def _require_out(
    out: Any, shape: tuple[int, ...], dtype: Any, place: Place, inputs: dict[str, Array]
) -> None:
    array = as_array(out, "out")
    require_place(array, "out", place)
    if array.dtype != dtype:
        raise TypeError(f"out must have dtype {dtype}, got {describe(array)}")
    if array.shape != shape:
        raise ValueError(f"out must have shape {shape}, got {describe(array)}")
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ValueError("out is read-only")
    if overlaps_itself(array):
        raise ValueError(f"out has elements that share memory (strides {array.strides})")
    for name, operand in inputs.items():
        if memory_overlaps(array, operand):
            raise ValueError(f"out overlaps {name} in memory; give it memory of its own")


def _operand_arrays(operands: Operands) -> Iterator[tuple[str, Array]]:
    """Every optional array that a call reads, with the name that the caller knows."""
    for name in ("mask", "bias", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k"):
        array = getattr(operands, name)
        if array is not None:
            yield name, array
    for name in ("query", "key", "value"):
        factors = getattr(operands, f"{name}_descale")
        if factors is not None:
            yield f"{name[0]}_descale", factors
    if operands.block_mask is not None:
        yield "block_mask.blocks", operands.block_mask.blocks
        if operands.block_mask.mask is not None:
            yield "block_mask.mask", operands.block_mask.mask
    if operands.score_mod is not None:
        for name, param in operands.score_mod.params.items():
            yield f"score_mod.params[{name!r}]", param
