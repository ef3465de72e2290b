"""The optional operands of a call: mask, bias, block_mask, ALiBi, sinks, score_mod, checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyflash._arrays import (
    FLOAT_DTYPES,
    HOST,
    Place,
    as_array,
    as_boolean,
    dense_copy,
    describe,
    require_place,
)
from cupyflash._options import Options
from cupyflash._problem import Operands
from cupyflash.block_mask import BlockMask
from cupyflash.errors import UnsupportedError
from cupyflash.score_mod import ScoreMod

Array = Any


@dataclass(frozen=True)
class ScoreShape:
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


def optional_operands(options: Options, scores: ScoreShape, place: Place) -> dict[str, Any]:
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


def mask_shape(operands: Operands, scores: ScoreShape) -> tuple[int, ...]:
    """Return `Problem.mask_shape`."""
    masks = [mask for mask in operands.masks if mask is not None]
    if operands.block_mask is not None:
        masks.append(operands.block_mask.blocks)
    if scores.varlen or not masks:
        return ()
    lengths = (scores.batch, scores.num_heads, scores.seqlen_q, scores.seqlen_k)
    return tuple(
        1 if all(mask.shape[axis] == 1 for mask in masks) else length
        for axis, length in enumerate(lengths)
        if length is not None
    )


def _boolean(x: Any, name: str, place: Place) -> Array:
    array = as_boolean(x, name)
    require_place(array, name, place)
    return array


def _floating(x: Any, name: str, place: Place) -> Array:
    array = as_array(x, name)
    require_place(array, name, place)
    if array.dtype not in FLOAT_DTYPES or not array.dtype.isnative:
        raise TypeError(
            f"{name} must have a dtype among {', '.join(FLOAT_DTYPES.values())}, "
            f"got {describe(array)}"
        )
    return array


def _float32(x: Any, name: str, place: Place) -> Array:
    array = as_array(x, name)
    require_place(array, name, place)
    if array.dtype != np.float32:
        raise TypeError(f"{name} must have dtype float32, got {describe(array)}; use .astype")
    return array


def _broadcast(array: Array, name: str, scores: ScoreShape) -> Array:
    """Return `array` with 4 axes, size 1 where it broadcasts."""
    if array.ndim > 4:
        raise ValueError(f"{name} must have at most 4 axes (b, h, sq, sk), got {describe(array)}")
    spread = array.reshape((1,) * (4 - array.ndim) + array.shape)
    if not scores.broadcasts(spread.shape):
        raise ValueError(
            f"{name} must broadcast to (b, h, sq, sk) = {scores}, got {describe(array)}"
        )
    return spread


def _alibi_slopes(x: Any, scores: ScoreShape, place: Place) -> Array:
    slopes = _float32(x, "alibi_slopes", place)
    allowed = ((scores.num_heads,), (scores.batch, scores.num_heads))
    if slopes.shape not in allowed:
        raise ValueError(
            f"alibi_slopes must have shape {allowed[0]} or {allowed[1]}, got {describe(slopes)}"
        )
    return slopes[None] if slopes.ndim == 1 else slopes


def _block_mask(x: Any, scores: ScoreShape, place: Place) -> BlockMask:
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
        require_place(param, f"score_mod.params[{name!r}]", place)
    if place == HOST and x.numpy_forward is None:
        raise UnsupportedError(
            "score_mod has no numpy_forward, so host arrays cannot use it; "
            "give ScoreMod(..., numpy_forward=..., numpy_backward=...)"
        )
    if place != HOST:  # kernels read arrays by flat index
        params = {
            name: param if param.flags.c_contiguous else dense_copy(param)
            for name, param in params.items()
        }
    return replace(x, params=params)
