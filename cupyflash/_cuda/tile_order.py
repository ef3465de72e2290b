"""In which order the thread blocks of a persistent kernel take tiles of different lengths."""

from __future__ import annotations

import heapq
import math

import numpy as np
import numpy.typing as npt

from cupyflash._cuda.warpgroup import ROWS, round_up
from cupyflash._problem import Problem

__all__ = [
    "key_tile_order",
    "key_tiles",
    "query_tiles",
    "seeing_queries",
    "seen_keys",
    "tile_order",
    "tile_places",
]

_CACHE_ELEMENTS = 8 << 20  # 16-bit elements that fill about half of an L2 cache
_MOST_ELEMENTS = 2 * _CACHE_ELEMENTS  # where each is read as long as few others are
# What it takes to begin and end a tile, in tiles that pass by it.
_QUERY_TILE_START = 2
_KEY_TILE_START = 1
# Of a query tile's time, if it has rows for no warpgroup: the last one has rows for few, but these
# take longer than their share.
_LEAST_SHARE = 0.4
_BALANCED = 2048  # tiles that are shared out one by one, half a microsecond each


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
    lower, upper = _band(problem)
    counts = _tiles_seen(problem.seqlen_q, problem.seqlen_k, lower, upper, block_m, block_n)
    return np.maximum(counts, 1)


def query_tiles(problem: Problem, block_m: int, block_n: int) -> npt.NDArray[np.int64]:
    """Return how many query tiles of a head pass by each key tile."""
    lower, upper = _band(problem)
    return _tiles_seen(problem.seqlen_k, problem.seqlen_q, -upper, -lower, block_n, block_m)


def _band(problem: Problem) -> tuple[float, float]:
    """Return the least and the greatest difference of a key and a query that sees it."""
    diagonal = problem.diagonal(problem.seqlen_q, problem.seqlen_k)
    left, right = problem.window_left, problem.window_right
    lower = -math.inf if left is None else diagonal - left
    upper = math.inf if right is None else diagonal + right
    return lower, upper


def _tiles_seen(
    rows: int, columns: int, lower: float, upper: float, block: int, width: int
) -> npt.NDArray[np.int64]:
    """Return how many tiles of `width` columns each `block` rows see: `Band` in key_range.cuh."""
    first = np.arange(0, rows, block)
    last = np.minimum(first + block, rows)
    begin = np.maximum(0, first + lower)
    end = np.minimum(columns, last + upper)
    tiles = np.where(begin < end, np.ceil(end / width) - begin // width, 0)
    return tiles.astype(np.int64)


def tile_order(problem: Problem, block_m: int, block_n: int, blocks: int) -> npt.NDArray[np.int32]:
    """Return (rounds, blocks): the query tiles that each thread block takes, one after the other.

    Query tile t of head h in batch b has number ``(b * num_heads + h) * tiles + t``; -1 ends a
    column. A few heads at a time, whose keys and values the L2 cache holds, the longest tiles
    first. Of many tiles most are dealt out there and back, which evens out what falls steadily;
    each of the last goes to the block that has the least to do so far, as if blocks came for more.
    """
    lengths = key_tiles(problem, block_m, block_n)
    keys = problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    most = max(1, _MOST_ELEMENTS // keys)
    pairs = problem.batch * problem.num_heads_kv
    groups = -(-pairs // most)  # of equal size: a small one at the end would leave blocks idle
    heads = -(-pairs // groups) * problem.group_size
    costs = lengths.astype(np.float64) + _QUERY_TILE_START
    rows_of_last = problem.seqlen_q - (len(lengths) - 1) * block_m
    costs[-1] *= _LEAST_SHARE + (1 - _LEAST_SHARE) * round_up(rows_of_last, ROWS) / block_m
    return _dealt(costs, problem.batch * problem.num_heads, heads, blocks)


def tile_places(problem: Problem, block_m: int, block_n: int, blocks: int) -> npt.NDArray[np.int32]:
    """Return `tile_order` as kernels read it: (first_row, head, batch, next place) for each place.

    A thread block starts at the place of its number; what it takes after that lies side by side. -1
    stands for no tile, and for no next one.
    """
    order = tile_order(problem, block_m, block_n, blocks)
    tiles = -(-problem.seqlen_q // block_m)
    exists = order.T >= 0
    later = exists.copy()
    later[:, 0] = False
    places = np.full((blocks + int(later.sum()), 4), -1, np.int32)
    row = np.empty(exists.shape, np.int32)
    row[:, 0] = np.arange(blocks)
    row[later] = np.arange(blocks, len(places))
    numbers, rows = order.T[exists], row[exists]
    pair, tile = np.divmod(numbers, tiles)
    batch, head = np.divmod(pair, problem.num_heads)
    places[rows, 0] = tile * block_m
    places[rows, 1] = head
    places[rows, 2] = batch
    follows = later[:, 1:]
    places[row[:, :-1][follows], 3] = row[:, 1:][follows]
    return places


def key_tile_order(
    problem: Problem, block_m: int, block_n: int, blocks: int
) -> npt.NDArray[np.int32]:
    """Return what `tile_order` does, of key tiles of key-value heads, for the backward's blocks."""
    lengths = query_tiles(problem, block_m, block_n) * problem.group_size
    # Beside q and grad_out, their gradients' float32 sums pass.
    rows = problem.seqlen_q * (3 * problem.head_dim + problem.head_dim_v)
    heads = max(1, _CACHE_ELEMENTS // (rows * problem.group_size))
    costs = lengths.astype(np.float64) + _KEY_TILE_START
    return _dealt(costs, problem.batch * problem.num_heads_kv, heads, blocks)


def _dealt(
    costs_of_head: npt.NDArray[np.float64], pairs: int, heads: int, blocks: int
) -> npt.NDArray[np.int32]:
    order = _by_cost(costs_of_head, pairs, heads)
    costs = costs_of_head[order % len(costs_of_head)]
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
    tiles: npt.NDArray[np.int32], costs: npt.NDArray[np.float64], loads: npt.NDArray[np.float64]
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


def _by_cost(costs: npt.NDArray[np.float64], pairs: int, heads: int) -> npt.NDArray[np.int32]:
    """Return all tiles by groups of `heads`, and the longest of a group first."""
    by_cost = np.argsort(-costs, kind="stable").astype(np.int32)[:, None]
    first = np.arange(pairs, dtype=np.int32) * np.int32(len(costs))
    whole = pairs - pairs % heads
    groups = by_cost + first[:whole].reshape(-1, 1, heads)
    return np.concatenate([groups.ravel(), (by_cost + first[whole:]).ravel()])
