"""In which order the thread blocks of a persistent kernel take query tiles of different lengths."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from cupyflash._problem import Problem

__all__ = ["key_tiles", "seeing_queries", "seen_keys", "tile_order"]

_CACHE_ELEMENTS = 8 << 20  # 16-bit elements that fill about half of an L2 cache
_START = 1  # of a query tile, in key tiles
_BALANCED = 1024  # query tiles that are shared out one by one, half a microsecond each


def seen_keys(problem: Problem) -> tuple[int, int]:
    """Return the first key that any query sees, and the one after the last: `key_range.cuh`."""
    diagonal = problem.diagonal(problem.seqlen_q, problem.seqlen_k)
    left, right = problem.window_left, problem.window_right
    begin = 0 if left is None else max(0, diagonal - left)
    end = problem.seqlen_k
    if right is not None:
        end = min(end, diagonal + right + problem.seqlen_q)
    return begin, end


def seeing_queries(problem: Problem) -> tuple[int, int]:
    """Return the first query that sees any key, and the one after the last."""
    diagonal = problem.diagonal(problem.seqlen_q, problem.seqlen_k)
    left, right = problem.window_left, problem.window_right
    begin = 0 if right is None else max(0, -(diagonal + right))
    end = problem.seqlen_q
    if left is not None:
        end = min(end, problem.seqlen_k - (diagonal - left))
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
    first. Of many tiles most are dealt out there and back, which evens out what falls steadily;
    each of the last goes to the block that has the least to do so far, as if blocks came for more.
    """
    lengths = key_tiles(problem, block_m, block_n)
    order = _by_length(lengths, problem.batch * problem.num_heads, _heads_at_once(problem))
    costs = (lengths + _START)[order % len(lengths)]
    dealt = max(0, order.size - _BALANCED) // blocks * blocks
    table, loads = order[:dealt].reshape(-1, blocks), costs[:dealt].reshape(-1, blocks)
    for rows in (table, loads):
        rows[1::2] = rows[1::2, ::-1].copy()
    columns = _shared_out(order[dealt:], costs[dealt:], loads.sum(0))
    last = np.full((max(map(len, columns)) + 1, blocks), -1, np.int32)
    for block, column in enumerate(columns):
        last[: len(column), block] = column
    return np.concatenate([table, last])


def _shared_out(
    tiles: npt.NDArray[np.int32], costs: npt.NDArray[np.int64], loads: npt.NDArray[np.int64]
) -> list[list[int]]:
    """Return what each block takes beyond the loads that they have."""
    columns: list[list[int]] = [[] for _ in loads]
    coming = [(load, block) for block, load in enumerate(loads.tolist())]
    heapq.heapify(coming)
    for tile, cost in zip(tiles.tolist(), costs.tolist(), strict=True):
        load, block = coming[0]
        columns[block].append(tile)
        heapq.heapreplace(coming, (load + cost, block))
    return columns


def _by_length(lengths: npt.NDArray[np.int64], pairs: int, heads: int) -> npt.NDArray[np.int32]:
    """Return all query tiles by groups of `heads`, and the longest of a group first."""
    by_length = np.argsort(-lengths, kind="stable").astype(np.int32)[:, None]
    first = np.arange(pairs, dtype=np.int32) * np.int32(len(lengths))
    whole = pairs - pairs % heads
    groups = by_length + first[:whole].reshape(-1, 1, heads)
    return np.concatenate([groups.ravel(), (by_length + first[whole:]).ravel()])


def _heads_at_once(problem: Problem) -> int:
    dims = problem.head_dim + problem.head_dim_v
    return max(1, _CACHE_ELEMENTS // dims // problem.seqlen_k) * problem.group_size
