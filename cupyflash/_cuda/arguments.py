"""What a launch is given: strides, options and addresses, in the structs of `params`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupyflash._cuda.params import ATTENTION, ITEMSIZE, OPEN, SCORE_ARRAYS, SCORE_PARAMS
from cupyflash._problem import Operands, Problem

__all__ = [
    "OptionalLayout",
    "ScoreLayout",
    "Strides",
    "address",
    "alignment",
    "fill",
    "optional_addresses",
    "row_alignment",
    "row_bytes",
    "values_of",
]

Strides = tuple[int, ...]  # of an array, in bytes, as NumPy gives them

_WIDEST = 16  # bytes of the widest access


def attention_values(problem: Problem) -> npt.NDArray[np.void]:
    """Return the `Attention` struct of a problem, with the strides of ALiBi and sinks at 0."""
    values = np.zeros((), ATTENTION)
    values["softmax_scale"] = problem.softmax_scale
    values["softcap"] = problem.softcap or 0.0
    for name in ("batch", "seqlen_q", "seqlen_k", "num_heads", "group_size", "head_dim"):
        values[name] = getattr(problem, name)
    values["head_dim_v"] = problem.head_dim_v
    for side in ("window_left", "window_right"):
        bound = getattr(problem, side)
        values[side] = OPEN if bound is None else min(bound, OPEN)
    values["top_left"] = problem.top_left
    threshold = round(problem.dropout_p * 2**32)
    values["dropout_threshold"] = min(threshold, 2**32 - 1)
    # A threshold above every word drops all.
    values["keep_factor"] = 1 / (1 - problem.dropout_p) if threshold < 2**32 else 0.0
    return values


def head_strides(strides: Strides, itemsize: int) -> tuple[int, int, int]:
    """Return (batch, row, head) distances in elements of ``(b, s, h, d)`` or ``(total, h, d)``."""
    distances = [stride // itemsize for stride in strides[:-1]]
    batch, row, head = [0] * (3 - len(distances)) + distances
    return batch, row, head


def statistic_strides(strides: Strides, itemsize: int) -> tuple[int, int, int]:
    """Return (batch, row, head) distances in elements of ``(b, h, s)`` or ``(h, total)``."""
    batch, head, row = [0] * (3 - len(strides)) + [stride // itemsize for stride in strides]
    return batch, row, head


def addresses(arrays: Iterable[Any]) -> list[int]:
    """Return `address` of each."""
    return [0 if array is None else array.data.ptr for array in arrays]


def address(array: Any) -> int:
    """Return the device address of an array; 0 for None."""
    return 0 if array is None else int(array.data.ptr)


def alignment(numbers: Iterable[int]) -> int:
    """Return the largest power of two, up to 16, that divides all the addresses and strides."""
    bits = _WIDEST
    for number in numbers:
        bits |= number
    return bits & -bits


def row_alignment(pointers: int, strides: Iterable[Strides]) -> int:
    """Return the same for every row of arrays whose addresses are multiples of `pointers`."""
    return alignment((pointers, *(stride for array in strides for stride in array[:-1])))


def row_bytes(array: Any) -> int:
    """Return the bytes of the widest access along every row of a 4-D array; None: an element's."""
    if array is None:
        return 1
    *strides, step = array.strides
    if step != array.itemsize or array.shape[-1] == 1:
        return int(array.itemsize)
    spread = (stride for stride, n in zip(strides, array.shape, strict=False) if n > 1)
    return alignment((address(array), *spread, array.shape[-1] * step))


class ScoreLayout(NamedTuple):
    """Shape and strides in bytes of an array that broadcasts over ``(b, h, sq, sk)``."""

    shape: tuple[int, ...]
    strides: Strides
    itemsize: int

    @classmethod
    def of(cls, array: Any) -> ScoreLayout | None:
        """The layout of an array; None for None."""
        return None if array is None else cls(array.shape, array.strides, array.dtype.itemsize)

    def values(self) -> tuple[int, ...]:
        """Return a ``ScoreStrides`` struct."""
        distances = (
            0 if length == 1 else stride // self.itemsize
            for length, stride in zip(self.shape, self.strides, strict=True)
        )
        return *distances, *(OPEN if length == 1 else length for length in self.shape[2:])


def _per_head(array: Any) -> Strides:
    """Return the strides in bytes of ``(1 or b, heads)``; 0 where one serves all, or None."""
    if array is None:
        return (0, 0)
    return (0 if array.shape[0] == 1 else array.strides[0], array.strides[1])


class OptionalLayout(NamedTuple):
    """Strides, in bytes, of the optional arrays of a call."""

    alibi_slopes: Strides  # by (batch, head); 0 if absent
    sinks: Strides
    mask: ScoreLayout | None
    inner_mask: ScoreLayout | None
    bias: ScoreLayout | None
    blocks: ScoreLayout | None
    block_size: tuple[int, int]
    param_sizes: tuple[int, ...]  # elements of a score_mod's arrays
    bias_bytes: int  # that an access along the bias's rows may move at once
    descales: tuple[Strides, Strides, Strides]  # of q, k, v by (batch, head); 0 if absent

    @classmethod
    def of(cls, operands: Operands) -> OptionalLayout:
        slopes, sinks = operands.alibi_slopes, operands.sinks
        block_mask = operands.block_mask
        mask, inner_mask = operands.masks
        return cls(
            _per_head(slopes),
            (0,) if sinks is None else tuple(sinks.strides),
            ScoreLayout.of(mask),
            ScoreLayout.of(inner_mask),
            ScoreLayout.of(operands.bias),
            None if block_mask is None else ScoreLayout.of(block_mask.blocks),
            (1, 1) if block_mask is None else block_mask.block_size,
            tuple(array.size for array in operands.score_arrays),
            row_bytes(operands.bias),
            (
                _per_head(operands.query_descale),
                _per_head(operands.key_descale),
                _per_head(operands.value_descale),
            ),
        )

    def scores(self, mask_shape: tuple[int, ...]) -> npt.NDArray[np.void]:
        """Return a ``ScoreArrays`` struct."""
        values = np.zeros((), SCORE_ARRAYS)
        for name in ("mask", "inner_mask", "bias", "blocks"):
            layout = getattr(self, name)
            if layout is not None:
                values[name] = layout.values()
        values["param_sizes"][: len(self.param_sizes)] = self.param_sizes
        values["block_rows"], values["block_cols"] = (min(size, OPEN) for size in self.block_size)
        for axis, length in zip(("batch", "heads", "rows", "cols"), mask_shape, strict=False):
            values[f"map_{axis}"] = length
        return values


def optional_addresses(operands: Operands) -> dict[str, Any]:
    """Return the pointers of the optional operands, and the seed."""
    block_mask, seed = operands.block_mask, operands.seed
    mask, inner_mask = operands.masks
    on_device = not isinstance(seed, int)
    return {
        "cu_seqlens_q": address(operands.cu_seqlens_q),
        "cu_seqlens_k": address(operands.cu_seqlens_k),
        "alibi_slopes": address(operands.alibi_slopes),
        "sinks": address(operands.sinks),
        "mask": address(mask),
        "inner_mask": address(inner_mask),
        "bias": address(operands.bias),
        "score_params": tuple(map(address, operands.score_arrays)),
        "query_descale": address(operands.query_descale),
        "key_descale": address(operands.key_descale),
        "value_descale": address(operands.value_descale),
        "blocks": 0 if block_mask is None else address(block_mask.blocks),
        "seed_address": address(seed) if on_device else 0,
        "seed": 0 if on_device else int(seed),
    }


def values_of(names: Iterable[str], addresses: Mapping[str, Any]) -> list[int]:
    """Return what `Launcher` takes for the fields `names`; what has no address is null."""
    values: list[int] = []
    for name in names:
        if name.endswith("score_params"):
            given = addresses.get(name, ())
            values += (*given, *(0,) * (SCORE_PARAMS - len(given)))
        else:
            values.append(addresses.get(name, 0))
    return values


def fill(
    params: npt.NDArray[np.void],
    problem: Problem,
    heads: Mapping[str, Strides],
    statistics: Mapping[str, Strides | None],
    optional: OptionalLayout,
) -> None:
    """Write everything but pointers into a params struct.

    Parameters
    ----------
    params : structured array
        One element of `FORWARD_PARAMS` or `BACKWARD_PARAMS`, zeros.
    problem : Problem
        Lengths and options.
    heads, statistics : mapping of str to strides
        Strides in bytes of the arrays with a head_dim and of those without; None: not given.
    optional : OptionalLayout
        Of the call's operands.
    """
    accumulator = ITEMSIZE[problem.accumulator_dtype]
    dtypes = dict.fromkeys(("key", "value"), problem.key_dtype) | {"out": problem.output_dtype}
    for name, strides in heads.items():
        params[f"{name}_strides"] = head_strides(strides, ITEMSIZE[dtypes.get(name, problem.dtype)])
    for name, given in statistics.items():
        if given is not None:
            params[f"{name}_strides"] = statistic_strides(given, accumulator)
    attention = attention_values(problem)
    (alibi_batch, alibi_head), (sinks,) = optional.alibi_slopes, optional.sinks
    float32 = ITEMSIZE["float32"]
    attention["alibi_batch_stride"] = alibi_batch // float32
    attention["alibi_head_stride"] = alibi_head // float32
    attention["sinks_stride"] = sinks // float32
    params["attention"] = attention
    params["scores"] = optional.scores(problem.mask_shape)
