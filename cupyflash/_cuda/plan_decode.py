"""How a call on a key-value cache runs: `AppendPlan`, `DecodePlan`.

As in `plan`, these are pure functions of what is asked and of the device, and a plan holds its
stub. Attention is split-KV decoding (Flash-Decoding, Dao et al. 2023): blocks share the keys of an
entry, and a second kernel combines what they found.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from cupyflash._cuda.config import constant
from cupyflash._cuda.config_decode import CACHE_PARAMS, AppendConfig, DecodeConfig
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import (
    VECTOR_BYTES,
    KernelLaunch,
    access_width,
    check_lengths,
    entry_point,
    kernel_launch,
    scale_can_wait,
    stub,
)
from cupyflash._cuda.params import ITEMSIZE, size_assertion
from cupyflash._cuda.plan_mma_common import takes_exact_softcap
from cupyflash._cuda.tiles_decode import (
    FIXED_SPLIT_KEYS,
    DecodeTile,
    choose_splits,
    choose_tile,
)
from cupyflash._problem import Problem

__all__ = [
    "AppendPlan",
    "CacheProblem",
    "DecodePlan",
    "Splits",
    "plan_append",
    "plan_decode",
    "splits_of",
    "tile_of",
]

_INCLUDE = "decode/kernel.cuh"
_PARAMS = "CacheParams"
_APPEND_THREADS = 128  # append_threads in kernels/decode/append.cuh
_COMBINE_WARPS = 4  # combine_warps in kernels/decode/combine.cuh
_FLOAT32 = 4


@dataclass(frozen=True)
class CacheProblem:
    """What is asked, without arrays: the attention, with seqlen_k an entry's capacity, and more."""

    attention: Problem
    page_size: int = 0  # 0: an entry lies in one piece
    new_tokens: int = 0
    new_dtype: str | None = None  # of new tokens; None: that of the caches
    key_factors: bool = False  # k's descales are arrays, which softmax_scale does not know
    rotary_dtype: str | None = None  # of cosines and sines; None: nothing is turned
    interleaved: bool = True

    @property
    def given_dtype(self) -> str:
        """The dtype of new tokens."""
        return self.new_dtype or self.attention.key_dtype

    @property
    def padded_dims(self) -> tuple[int, int]:
        """Head dims that kernels are compiled for: rows of whole 64 bytes."""
        dims = self.attention.head_dim, self.attention.head_dim_v
        step = 64 // ITEMSIZE[self.attention.key_dtype]
        head_dim, head_dim_v = (-(-dim // step) * step for dim in dims)
        return head_dim, head_dim_v

    @property
    def rows(self) -> int:
        """Queries times heads that share the keys of one head."""
        return self.attention.seqlen_q * self.attention.group_size

    @property
    def pairs(self) -> int:
        """Entries times heads of keys."""
        return self.attention.batch * self.attention.num_heads_kv

    def visible(self, longest: int) -> int:
        """Return how many keys of an entry of this length a tile of queries sees at most."""
        problem = self.attention
        if problem.window_left is None or problem.window_right is None:
            return longest
        return min(longest, problem.window_left + problem.window_right + problem.seqlen_q)


@dataclass(frozen=True)
class Splits:
    """Into how many parts the keys of an entry are cut, and how many keys each has."""

    count: int
    keys: int = 0  # 0: as many as the others


@dataclass(frozen=True)
class AppendPlan:
    """How new tokens are written."""

    config: AppendConfig
    launch: KernelLaunch

    @property
    def launches(self) -> tuple[KernelLaunch, ...]:
        return (self.launch,)

    @cached_property
    def stub(self) -> str:
        """CUDA source that instantiates the kernel."""
        return stub(
            "decode/append.cuh",
            size_assertion(_PARAMS, CACHE_PARAMS),
            constant(self.config),
            f"static_assert(append_threads == {self.launch.threads});",
            entry_point(self.launch, _PARAMS, "append<config>"),
        )


@dataclass(frozen=True)
class DecodePlan:
    """How queries attend to the cache."""

    config: DecodeConfig
    tile: DecodeTile
    splits: Splits
    rows: int  # of all entries and heads
    launch: KernelLaunch
    combine: KernelLaunch | None

    @property
    def launches(self) -> tuple[KernelLaunch, ...]:
        return (self.launch,) if self.combine is None else (self.launch, self.combine)

    @property
    def partial_rows(self) -> int:
        """Rows of partial sums."""
        return self.rows * self.splits.count if self.config.split else 0

    @cached_property
    def stub(self) -> str:
        """CUDA source that instantiates the kernels."""
        entries = [entry_point(self.launch, _PARAMS, "decode<config>", self.tile.blocks)]
        if self.combine is not None:
            entries.append(entry_point(self.combine, _PARAMS, "combine<config>"))
        return stub(
            _INCLUDE,
            size_assertion(_PARAMS, CACHE_PARAMS),
            constant(self.config),
            f"static_assert(DecodeShape<config>::bytes == {self.launch.shared_memory});",
            f"static_assert(combine_warps == {_COMBINE_WARPS});",
            *entries,
        )


@lru_cache(maxsize=1024)
def plan_append(problem: CacheProblem, vector_bytes: int = VECTOR_BYTES) -> AppendPlan:
    """Plan the append; `vector_bytes` divides all addresses and strides of tokens and caches."""
    attention = problem.attention
    check_lengths(attention)
    width = access_width(
        vector_bytes, ITEMSIZE[problem.given_dtype], attention.head_dim, attention.head_dim_v
    )
    rotary = problem.rotary_dtype is not None
    rows = problem.new_tokens * attention.num_heads_kv
    rows += attention.seqlen_q * attention.num_heads * rotary
    blocks = -(-attention.batch * rows * 32 // _APPEND_THREADS)
    config = AppendConfig(
        dtype=problem.given_dtype,
        kv_dtype=attention.key_dtype,
        rotary_dtype=problem.rotary_dtype or "float32",
        width=width,
        page_size=problem.page_size,
        rotary=rotary,
        interleaved=problem.interleaved,
    )
    return AppendPlan(config, kernel_launch("cupyflash_append", blocks, _APPEND_THREADS))


@lru_cache(maxsize=4096)
def splits_of(
    problem: CacheProblem,
    device: Device,
    longest: int,
    num_splits: int = 0,
    batch_invariant: bool = False,
) -> Splits:
    """Decide how blocks share the keys of an entry.

    Parameters
    ----------
    problem, device : CacheProblem, Device
        What is asked, and of which GPU.
    longest : int
        No entry is longer, as far as the host knows.
    num_splits : int, default 0
        0 = chosen.
    batch_invariant : bool, default False
        Chosen parts have a fixed number of keys, so that an entry's depend on itself alone.
    """
    if num_splits > 0:
        return Splits(num_splits)
    if batch_invariant:
        capacity = problem.attention.seqlen_k
        return Splits(max(1, -(-capacity // FIXED_SPLIT_KEYS)), FIXED_SPLIT_KEYS)
    tile = tile_of(problem, device)
    tasks = problem.pairs * -(-problem.rows // tile.rows)
    steps = -(-problem.visible(longest) // tile.keys)
    return Splits(choose_splits(tasks, steps, device.multiprocessors, tile.blocks))


def tile_of(problem: CacheProblem, device: Device) -> DecodeTile:
    """Return how a block shares its work; UnsupportedError if the device has too little memory."""
    itemsize = ITEMSIZE[problem.attention.key_dtype]
    return choose_tile(problem.rows, *problem.padded_dims, device, itemsize)


@lru_cache(maxsize=4096)
def plan_decode(
    problem: CacheProblem, device: Device, splits: Splits, vector_bytes: int = VECTOR_BYTES
) -> DecodePlan:
    """Plan the attention; `vector_bytes` divides all addresses and strides of queries and caches.

    Raises
    ------
    UnsupportedError
        The device has too little shared memory, or indices would not fit.
    """
    attention = problem.attention
    check_lengths(attention)
    head_dim, head_dim_v = problem.padded_dims
    tile = tile_of(problem, device)
    tiles = -(-problem.rows // tile.rows)
    dims = attention.head_dim, attention.head_dim_v
    config = DecodeConfig(
        dtype=attention.dtype,
        kv_dtype=attention.key_dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        row_warps=tile.row_warps,
        key_warps=tile.key_warps,
        warp_keys=tile.warp_keys,
        stages=tile.stages,
        kept_steps=_kept_steps(tile, max(head_dim, head_dim_v)),
        load_width=access_width(vector_bytes, ITEMSIZE[attention.dtype], *dims),
        cache_width=_cache_width(vector_bytes, attention.key_dtype, *dims),
        store_width=access_width(VECTOR_BYTES, ITEMSIZE[attention.dtype], attention.head_dim_v),
        page_size=problem.page_size,
        raw_scores=_raw_scores(problem),
        window=attention.is_banded,
        softcap=attention.softcap is not None,
        alibi="alibi_slopes" in attention.extras,
        sinks="sinks" in attention.extras,
        exact_softcap=takes_exact_softcap(attention),
        split=splits.count > 1 or splits.keys > 0,  # alike, however many a fixed size makes
    )
    rows = problem.pairs * problem.rows
    launch = kernel_launch(
        "cupyflash_decode",
        problem.pairs * tiles * splits.count,
        tile.threads,
        tile.shared_memory(head_dim, head_dim_v, ITEMSIZE[attention.key_dtype]),
    )
    combine = None
    if config.split:
        memory = _COMBINE_WARPS * head_dim_v * _FLOAT32
        combine = kernel_launch("cupyflash_combine", rows, 32 * _COMBINE_WARPS, memory)
    return DecodePlan(config, tile, splits, rows, launch, combine)


def _kept_steps(tile: DecodeTile, widest: int) -> int:
    """Return how many steps of the queries registers have room for beside the sums."""
    if widest <= 128:
        return 8
    return 4 if tile.row_warps == 1 else 0


def _cache_width(vector_bytes: int, dtype: str, *head_dims: int) -> int:
    """Return how many elements of a cache one load moves: cp.async moves 4 bytes at least."""
    width = access_width(vector_bytes, ITEMSIZE[dtype], *head_dims)
    return width if width * ITEMSIZE[dtype] >= 4 else 1


def _raw_scores(problem: CacheProblem) -> bool:
    """Whether the scale can wait for the exponent."""
    attention = problem.attention
    changed = attention.softcap is not None or "alibi_slopes" in attention.extras
    return not changed and not problem.key_factors and scale_can_wait(attention)
