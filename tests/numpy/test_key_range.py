"""Which tiles are visited: exactly what is visible, each once, masked only where needed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cupyflash import BlockMask, Tiling
from cupyflash._numpy.key_range import KeyRange
from cupyflash._numpy.mask import Mask
from cupyflash._numpy.rows import AccumulatorRows
from cupyflash._numpy.sequence import sequences
from cupyflash._problem import Operands, Problem

LENGTHS = st.integers(0, 30)
BOUNDS = st.none() | st.integers(0, 35) | st.just(2**80)


def pieces(seqlen_q, seqlen_k, left, right, top_left, tiling, block_mask=None):
    problem = Problem(
        "float32", 1, seqlen_q, seqlen_k, 1, 1, 4, 4, 0.5, left, right, top_left=top_left
    )
    nothing = np.empty(0)
    operands = Operands(nothing, nothing, nothing, block_mask=block_mask)
    (sequence,) = sequences(problem, operands)
    arguments = problem, operands, tiling, sequence, 0
    return KeyRange(*arguments), Mask(problem, operands, sequence, 0)


@given(
    LENGTHS, LENGTHS, BOUNDS, BOUNDS, st.booleans(),
    st.builds(Tiling, st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 12), st.integers(1, 12)), st.integers(0, 2**32),
)  # fmt: skip
def test_tiles_are_what_is_visible(
    seqlen_q, seqlen_k, left, right, top_left, tiling, block_size, seed
):
    grid = -(-seqlen_q // block_size[0]), -(-seqlen_k // block_size[1])
    blocks = np.random.default_rng(seed).random((1, 1, *grid)) < 0.6
    block_mask = BlockMask(blocks, block_size) if seed % 3 else None
    key_range, mask = pieces(seqlen_q, seqlen_k, left, right, top_left, tiling, block_mask)

    visits = np.zeros((seqlen_q, seqlen_k), int)
    visible = np.zeros((seqlen_q, seqlen_k), bool)
    for span in key_range.query_spans():
        for tile in key_range.tiles(*span):
            assert 0 < tile.shape[0] <= tiling.block_m
            assert 0 < tile.shape[1] <= tiling.block_n
            hidden = mask.hidden(tile)
            assert tile.windowed or hidden is None
            visits[tile.queries, tile.keys] += 1
            visible[tile.queries, tile.keys] = True if hidden is None else ~hidden

    rows, cols = np.ogrid[:seqlen_q, :seqlen_k]
    distance = cols - rows - (0 if top_left else seqlen_k - seqlen_q)
    expected = np.full((seqlen_q, seqlen_k), True)
    if left is not None:
        expected &= distance >= -min(left, 10**6)
    if right is not None:
        expected &= distance <= min(right, 10**6)
    if block_mask is not None:
        spread = blocks[0, 0].repeat(block_size[0], 0).repeat(block_size[1], 1)
        spread = spread[:seqlen_q, :seqlen_k]
        assert not visits[~spread].any()
        expected &= spread
    assert visits.max(initial=0) <= 1
    np.testing.assert_array_equal(visible, expected)


def test_causal_masks_the_diagonal_only():
    key_range, _ = pieces(256, 256, None, 0, False, Tiling(64, 64))
    masked = [tile.windowed for span in key_range.query_spans() for tile in key_range.tiles(*span)]
    assert len(masked) == 4 + 3 + 2 + 1
    assert sum(masked) == 4


def test_rows_are_converted_when_asked_for():
    source = np.ones((8, 3), np.float16)
    rows = AccumulatorRows(source, "float32")
    assert rows[2:4].dtype == np.float32
    source[...] = 2
    assert (rows[2:4] == 1).all()  # kept
    assert (rows[1:6] == 2).all()


def test_rows_that_blas_takes_are_not_copied():
    source = np.ones((8, 2, 3), np.float32)[:, 1]
    assert np.shares_memory(AccumulatorRows(source, "float32")[2:4], source)
