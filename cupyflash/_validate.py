"""From the caller's arguments to a `Call`: every check happens here, before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyflash import _options
from cupyflash._arrays import (
    FLOAT_DTYPES,
    HOST,
    Place,
    as_array,
    contiguous_last_axis,
    describe,
    memory_overlaps,
    overlaps_itself,
    place_of,
)
from cupyflash._layout import Layout
from cupyflash._options import Options
from cupyflash._problem import Operands, Problem
from cupyflash.block_mask import BlockMask
from cupyflash.errors import UnsupportedError
from cupyflash.score_mod import ScoreMod

Array = Any

MAX_HEAD_DIM = 256


@dataclass(frozen=True, eq=False)
class Sequences:
    """The arguments that make a call varlen."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None


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
    query, key, value = arrays = as_array(q, "q"), as_array(k, "k"), as_array(v, "v")
    place = place_of(query)
    for name, array in (("k", key), ("v", value)):
        _require_place(array, name, place)
    dtype = _common_dtype(query, key, value)
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
    scores = _ScoreShape(batch, num_heads, *longest, varlen=cu_seqlens is not None)
    extras = _extras(options, scores, place)
    dropout_p = _options.dropout_p(options.dropout_p)
    seed = _seed(options.seed, place, needed=dropout_p > 0)
    _options.engine(options.engine)
    _options.tiling(options.tiling)
    problem = Problem(
        dtype=dtype,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads=num_heads,
        num_heads_kv=key.shape[-2],
        head_dim=head_dim,
        head_dim_v=value.shape[-1],
        softmax_scale=_options.softmax_scale(options.softmax_scale, head_dim),
        window_left=left,
        window_right=0 if causal else right,
        top_left=top_left,
        softcap=_options.softcap(options.softcap),
        dropout_p=dropout_p,
        varlen=cu_seqlens is not None,
        extras=frozenset(extras),
    )
    cu_seqlens_q, cu_seqlens_k = cu_seqlens or (None, None)
    operands = Operands(
        query=query,
        key=key,
        value=value,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seed=0 if seed is None else seed,
        **extras,
    )
    if out is not None:
        shape = layout.users_shape((*query.shape[:-1], value.shape[-1]))
        inputs = dict(zip(("q", "k", "v"), arrays, strict=True)) | dict(_operand_arrays(operands))
        _require_out(out, shape, query.dtype, place, inputs)
    return Call(problem, operands, layout, place, options._replace(seed=seed), arrays, out)


def bind_gradient(x: Any, name: str, expected: Array, place: Place, dtype: Any) -> Array:
    """Check ``dout`` or ``dlse`` against the array that it is the gradient of."""
    gradient = as_array(x, name)
    _require_place(gradient, name, place)
    if gradient.dtype != dtype:
        raise TypeError(f"{name} must have dtype {dtype}, got {describe(gradient)}; use .astype")
    if gradient.shape != expected.shape:
        raise ValueError(
            f"{name} must have shape {tuple(expected.shape)}, got {describe(gradient)}"
        )
    return gradient


def require_score_derivative(call: Call) -> None:
    """Check that the call's score_mod can be differentiated where its arrays live."""
    score_mod = call.operands.score_mod
    if score_mod is not None and call.place == HOST and score_mod.numpy_backward is None:
        raise UnsupportedError(
            "score_mod has no numpy_backward, so its call has no gradients on the host; "
            "give ScoreMod(..., numpy_backward=...)"
        )


# --- q, k, v ------------------------------------------------------------------------------------


def _require_place(array: Array, name: str, place: Place) -> None:
    found = place_of(array)
    if found != place:
        raise TypeError(
            f"{name} lives on the {found} but q on the {place}; all arrays of one call must live "
            "in one place: use cupy.asarray or cupy.asnumpy"
        )


def _common_dtype(query: Array, key: Array, value: Array) -> str:
    for name, array in (("q", query), ("k", key), ("v", value)):
        dtype = array.dtype
        if dtype not in FLOAT_DTYPES or not dtype.isnative:
            raise _unusable_dtype(name, dtype)
        if dtype != query.dtype:
            raise TypeError(
                f"q, k and v must have one dtype, got q {query.dtype} and {name} {dtype}; "
                "use .astype"
            )
    return FLOAT_DTYPES[query.dtype]


def _unusable_dtype(name: str, dtype: np.dtype[Any]) -> Exception:
    supported = ", ".join(FLOAT_DTYPES.values())
    if dtype.name.startswith("float8"):
        return UnsupportedError(
            f"{name} has dtype {dtype}: no engine computes in 8 bits yet; supported: {supported}"
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
    if num_heads_kv == 0 or num_heads % num_heads_kv or num_heads == 0:
        raise ValueError(
            f"q's {num_heads} heads must be a positive multiple of k's {num_heads_kv} heads "
            f"(q {_users_shape(query, layout)}, k {_users_shape(key, layout)})"
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


def _users_shape(canonical: Array, layout: Layout) -> tuple[int, ...]:
    return layout.users_shape(tuple(canonical.shape))


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


def _cumulative(x: Any, name: str, total: int) -> Array:
    array = as_array(x, name)
    if array.dtype != np.int32:
        raise TypeError(
            f"{name} must have dtype int32, got {describe(array)}; use .astype('int32')"
        )
    if array.ndim != 1 or array.shape[0] == 0:
        raise ValueError(f"{name} must have shape (batch + 1,), got {describe(array)}")
    if place_of(array) == HOST:  # device values are never read by the host
        if array[0] != 0 or (np.diff(array) < 0).any():
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


# --- optional operands --------------------------------------------------------------------------


@dataclass(frozen=True)
class _ScoreShape:
    """``(b, h, sq, sk)``; of varlen calls the longest sequences, None where unknown."""

    batch: int
    num_heads: int
    seqlen_q: int | None
    seqlen_k: int | None
    varlen: bool

    def broadcasts(self, shape: tuple[int, ...]) -> bool:
        """Whether a 4-D shape fits; varlen arrays may be longer, as a wrong hint makes them."""
        fixed = all(
            length in (1, expected)
            for length, expected in zip(shape[:2], (self.batch, self.num_heads), strict=True)
        )
        return fixed and all(
            length in (1, expected) or (self.varlen and (expected is None or length > expected))
            for length, expected in zip(shape[2:], (self.seqlen_q, self.seqlen_k), strict=True)
        )

    def __str__(self) -> str:
        axes = (self.batch, self.num_heads, self.seqlen_q, self.seqlen_k)
        return "(" + ", ".join("any" if axis is None else str(axis) for axis in axes) + ")"


def _extras(options: Options, scores: _ScoreShape, place: Place) -> dict[str, Any]:
    """Check the optional operands; the keys are `Operands` fields and `Problem.extras`."""
    extras: dict[str, Any] = {}
    if options.mask is not None:
        extras["mask"] = _broadcast(_boolean(options.mask, "mask", place), "mask", scores)
    if options.bias is not None:
        extras["bias"] = _broadcast(_floating(options.bias, "bias", place), "bias", scores)
    if options.alibi_slopes is not None:
        extras["alibi_slopes"] = _alibi_slopes(options.alibi_slopes, scores, place)
    if options.sinks is not None:
        sinks = _float32(options.sinks, "sinks", place)
        if sinks.shape != (scores.num_heads,):
            raise ValueError(f"sinks must have shape ({scores.num_heads},), got {describe(sinks)}")
        extras["sinks"] = sinks
    if options.block_mask is not None:
        extras["block_mask"] = _block_mask(options.block_mask, scores, place)
    if options.score_mod is not None:
        extras["score_mod"] = _score_mod(options.score_mod, place)
    return extras


def _boolean(x: Any, name: str, place: Place) -> Array:
    array = as_array(x, name)
    _require_place(array, name, place)
    if array.dtype != np.bool_:
        raise TypeError(
            f"{name} must have dtype bool (True = takes part), got {describe(array)}; "
            "additive masks go in bias="
        )
    return array


def _floating(x: Any, name: str, place: Place) -> Array:
    array = as_array(x, name)
    _require_place(array, name, place)
    if array.dtype not in FLOAT_DTYPES or not array.dtype.isnative:
        raise TypeError(
            f"{name} must have a dtype among {', '.join(FLOAT_DTYPES.values())}, "
            f"got {describe(array)}"
        )
    return array


def _float32(x: Any, name: str, place: Place) -> Array:
    array = as_array(x, name)
    _require_place(array, name, place)
    if array.dtype != np.float32:
        raise TypeError(f"{name} must have dtype float32, got {describe(array)}; use .astype")
    return array


def _broadcast(array: Array, name: str, scores: _ScoreShape) -> Array:
    """Return `array` with 4 axes, size 1 where it broadcasts."""
    if array.ndim > 4:
        raise ValueError(f"{name} must have at most 4 axes (b, h, sq, sk), got {describe(array)}")
    spread = array.reshape((1,) * (4 - array.ndim) + array.shape)
    if not scores.broadcasts(spread.shape):
        raise ValueError(
            f"{name} must broadcast to (b, h, sq, sk) = {scores}, got {describe(array)}"
        )
    return spread


def _alibi_slopes(x: Any, scores: _ScoreShape, place: Place) -> Array:
    slopes = _float32(x, "alibi_slopes", place)
    allowed = ((scores.num_heads,), (scores.batch, scores.num_heads))
    if slopes.shape not in allowed:
        raise ValueError(
            f"alibi_slopes must have shape {allowed[0]} or {allowed[1]}, got {describe(slopes)}"
        )
    return slopes[None] if slopes.ndim == 1 else slopes


def _block_mask(x: Any, scores: _ScoreShape, place: Place) -> BlockMask:
    if not isinstance(x, BlockMask):
        raise TypeError(
            f"block_mask must be a cupyflash.BlockMask, got {type(x).__name__}; "
            "make one with BlockMask(blocks, block_size) or BlockMask.from_mask"
        )
    if scores.varlen or scores.seqlen_q is None or scores.seqlen_k is None:
        raise UnsupportedError("block_mask does not go with varlen calls; use mask= there")
    blocks = _boolean(x.blocks, "block_mask.blocks", place)
    block_m, block_n = x.block_size
    grid = (-(-scores.seqlen_q // block_m), -(-scores.seqlen_k // block_n))
    expected = (scores.batch, scores.num_heads, *grid)
    leads_fit = all(n in (1, e) for n, e in zip(blocks.shape[:2], expected[:2], strict=True))
    if blocks.shape[2:] != grid or not leads_fit:
        raise ValueError(
            f"block_mask.blocks must have shape (b or 1, h or 1, ceil(sq/{block_m}), "
            f"ceil(sk/{block_n})) = {expected}, got {describe(blocks)}"
        )
    mask = x.mask
    if mask is not None:
        mask = _broadcast(_boolean(mask, "block_mask.mask", place), "block_mask.mask", scores)
    return BlockMask(blocks, x.block_size, mask)


def _score_mod(x: Any, place: Place) -> ScoreMod:
    if not isinstance(x, ScoreMod):
        raise TypeError(f"score_mod must be a cupyflash.ScoreMod, got {type(x).__name__}")
    params = {name: as_array(p, f"score_mod.params[{name!r}]") for name, p in x.params.items()}
    for name, param in params.items():
        _require_place(param, f"score_mod.params[{name!r}]", place)
    if place == HOST and x.numpy_forward is None:
        raise UnsupportedError(
            "score_mod has no numpy_forward, so host arrays cannot use it; "
            "give ScoreMod(..., numpy_forward=..., numpy_backward=...)"
        )
    return replace(x, params=params)


def _seed(x: Any, place: Place, *, needed: bool) -> Any:
    if place == HOST or not hasattr(x, "dtype") or not getattr(x, "shape", None):
        return _options.seed(x, needed)
    seed = as_array(x, "seed")
    _require_place(seed, "seed", place)
    if seed.dtype != np.uint64 or seed.size != 1:
        raise TypeError(f"a device seed must be one uint64, got {describe(seed)}")
    return seed


# --- out ----------------------------------------------------------------------------------------


def _require_out(
    out: Any, shape: tuple[int, ...], dtype: Any, place: Place, inputs: dict[str, Array]
) -> None:
    array = as_array(out, "out")
    _require_place(array, "out", place)
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
    if operands.block_mask is not None:
        yield "block_mask.blocks", operands.block_mask.blocks
        if operands.block_mask.mask is not None:
            yield "block_mask.mask", operands.block_mask.mask
    if operands.score_mod is not None:
        for name, param in operands.score_mod.params.items():
            yield f"score_mod.params[{name!r}]", param
