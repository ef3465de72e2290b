"""In which order the thread blocks of a persistent kernel take query tiles of different lengths."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from cupyflash._problem import Problem

__all__ = ["key_tiles", "seen_keys", "tile_order"]

_CACHE_ELEMENTS = 8 << 20  # 16-bit elements that fill about half of an L2 cache
_START = 1.0  # of a query tile, in key tiles
_MOST_BALANCED = 1 << 17  # query tiles; more are balanced by their number


def seen_keys(problem: Problem) -> tuple[int, int]:
    """Return the first key that any query sees, and the one after the last: `key_range.cuh`."""
    diagonal = problem.diagonal(problem.seqlen_q, problem.seqlen_k)
    left, right = problem.window_left, problem.window_right
    begin = 0 if left is None else max(0, diagonal - left)
    end = problem.seqlen_k
    if right is not None:
        end = min(end, diagonal + right + problem.seqlen_q)
    return begin, end


def key_tiles(problem: Problem, block_m: int, block_n: int) -> npt.NDArray[np.int64]:
    """Return how many key tiles each query tile of a head visits: at least one."""
    first = np.arange(0, problem.seqlen_q, block_m)
    last = np.minimum(first + block_m, problem.seqlen_q)
    diagonal = problem.diagonal(problem.seqlen_q, problem.seqlen_k)
    begin, end = np.zeros_like(first), np.full_like(first, problem.seqlen_k)
    if problem.window_left is not None:
        begin = np.maximum(begin, first + diagonal - problem.window_left)
    if problem.window_right is not None:
        end = np.minimum(end, last + diagonal + problem.window_right)
    return np.where(begin < end, -(-end // block_n) - begin // block_n, 1)


def tile_order(problem: Problem, block_m: int, block_n: int, blocks: int) -> npt.NDArray[np.int32]:
    """Return (rounds, blocks): the query tiles that each thread block takes, one after the other.

    Query tile t of head h in batch b has number ``(b * num_heads + h) * tiles + t``; -1 ends a
    column. A few heads at a time, whose keys and values the L2 cache holds, the longest tiles
    first; each goes to the block that has the least to do so far, as if blocks came for more.
    """
    lengths = key_tiles(problem, block_m, block_n)
    tiles, pairs = len(lengths), problem.batch * problem.num_heads
    heads = _heads_at_once(problem)
    by_length = np.argsort(-lengths, kind="stable")[:, None]
    groups = (np.arange(first, min(first + heads, pairs)) for first in range(0, pairs, heads))
    order = np.concatenate([(by_length + group * tiles).ravel() for group in groups])
    if order.size > _MOST_BALANCED:
        order = np.pad(order, (0, -order.size % blocks + blocks), constant_values=-1)
        return order.reshape(-1, blocks).astype(np.int32)
    columns: list[list[int]] = [[] for _ in range(blocks)]
    loads = [(0.0, block) for block in range(blocks)]
    costs = lengths[order % tiles] + _START
    for tile, cost in zip(order.tolist(), costs.tolist(), strict=True):
        load, block = loads[0]
        columns[block].append(tile)
        heapq.heapreplace(loads, (load + cost, block))
    table = np.full((max(map(len, columns)) + 1, blocks), -1, np.int32)
    for block, column in enumerate(columns):
        table[: len(column), block] = column
    return table


def _heads_at_once(problem: Problem) -> int:
    dims = problem.head_dim + problem.head_dim_v
    return max(1, _CACHE_ELEMENTS // dims // problem.seqlen_k) * problem.group_size
