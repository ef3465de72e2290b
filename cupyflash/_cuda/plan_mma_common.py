"""What the plans of the mma engine's forward and backward share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from cupyflash._cuda.config import score_features
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import access_width, check_lengths, scale_can_wait
from cupyflash._cuda.params import ITEMSIZE
from cupyflash._cuda.tiles_mma import MmaBackwardTile, MmaForwardTile, bucket
from cupyflash._problem import Problem
from cupyflash.errors import UnsupportedError

__all__ = [
    "LEAST_CAPABILITY",
    "SUPPORTED_DTYPES",
    "bias_itemsize",
    "check_problem",
    "choose_tile",
    "common_fields",
    "leaves_scale",
    "takes_exact_softcap",
    "wider",
]

SUPPORTED_DTYPES = frozenset({"float16", "bfloat16"})
LEAST_CAPABILITY = (8, 0)
_LARGEST_FAST_SOFTCAP = 64.0  # the fast formula is off by a rounding error of the cap
_LARGEST_FAST_RATE = 1e37  # its factor softmax_scale / softcap, times 2 log2(e), is a float32

_ITEMSIZE = 2
_MAX_BIAS_BYTES = 4  # of an element in shared memory
_LEAST_DIVISOR = 2.0**-40

_Tile = TypeVar("_Tile", MmaForwardTile, MmaBackwardTile)


def check_problem(problem: Problem, device: Device) -> None:
    """Raise UnsupportedError for a dtype, device or lengths that are not this engine's."""
    if problem.dtype not in SUPPORTED_DTYPES:
        raise UnsupportedError(f"engine='mma' serves float16 and bfloat16, not {problem.dtype}")
    if device.compute_capability < LEAST_CAPABILITY:
        major, minor = device.compute_capability
        raise UnsupportedError(
            f"engine='mma' needs compute capability 8.0, and {device.name} has {major}.{minor}"
        )
    check_lengths(problem)


def wider(problem: Problem) -> int:
    """Return the wider head_dim that kernels are compiled for: the key of the tile tables."""
    return bucket(max(problem.head_dim, problem.head_dim_v))


def choose_tile(problem: Problem, device: Device, candidates: Iterable[_Tile]) -> _Tile:
    """Return the first tile that fits."""
    head_dims = bucket(problem.head_dim), bucket(problem.head_dim_v)
    limit = device.shared_memory_per_block_optin
    for tile in candidates:
        complaint = tile.complaint(*head_dims)
        needed = tile.shared_memory(*head_dims, bias_itemsize(problem))
        if complaint is None and needed > limit:
            complaint = f"{needed} bytes of shared memory are needed and {limit} allowed"
        if complaint is None:
            return tile
    raise UnsupportedError(
        f"{tile} does not fit the mma engine for {problem.dtype}, head_dim {problem.head_dim},"
        f" head_dim_v {problem.head_dim_v} on {device.name}: {complaint}."
        " Give tiling=None or smaller blocks."
    )


def bias_itemsize(problem: Problem) -> int:
    """Return the bytes of an element of the bias in shared memory: float64 is narrowed there."""
    return 0 if problem.bias_dtype is None else min(ITEMSIZE[problem.bias_dtype], _MAX_BIAS_BYTES)


def common_fields(
    problem: Problem,
    vector_bytes: int,
    store_bytes: int,
    bias_bytes: int,
    stored: tuple[int, ...],
) -> dict[str, Any]:
    """Return the fields that the forward's and the backward's configurations share."""
    bias_width = 1
    if problem.bias_dtype not in (None, "float64"):
        bias_width = access_width(bias_bytes, ITEMSIZE[problem.bias_dtype])
    return {
        "dtype": problem.dtype,
        "head_dim": bucket(problem.head_dim),
        "head_dim_v": bucket(problem.head_dim_v),
        "load_width": access_width(vector_bytes, _ITEMSIZE, problem.head_dim, problem.head_dim_v),
        "store_width": access_width(store_bytes, _ITEMSIZE, *stored),
        "raw_scores": leaves_scale(problem),
        "bias_width": bias_width,
        "exact_softcap": takes_exact_softcap(problem),
        **score_features(problem),
    }


def takes_exact_softcap(problem: Problem) -> bool:
    """Whether softcap takes the library's tanh, as two exponentials do not give it."""
    if problem.softcap is None:
        return False
    fastest = problem.softcap * _LARGEST_FAST_RATE
    return problem.softcap > _LARGEST_FAST_SOFTCAP or abs(problem.softmax_scale) > fastest


def leaves_scale(problem: Problem) -> bool:
    """Whether the scale can wait for the exponent; ALiBi's slopes are then divided by it."""
    if problem.softcap is not None or problem.extras & {"bias", "score_mod"}:
        return False
    least = _LEAST_DIVISOR if "alibi_slopes" in problem.extras else 0.0
    return scale_can_wait(problem) and problem.softmax_scale > least
