"""How calls on a key-value cache are planned: structs, shapes of blocks, splits."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest

from cupyflash import UnsupportedError
from cupyflash._cuda import config_decode
from cupyflash._cuda.device import Device
from cupyflash._cuda.plan_decode import (
    CacheProblem,
    Splits,
    plan_append,
    plan_decode,
    splits_of,
    tile_of,
)
from cupyflash._cuda.source import kernels_root
from cupyflash._cuda.tiles_decode import FIXED_SPLIT_KEYS, choose_splits
from cupyflash._problem import Problem

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
H100 = Device.known("sm_90a")


def problem_of(
    batch: int = 16, seqlen_k: int = 8192, heads: int = 32, heads_kv: int = 8, head_dim: int = 128,
    seqlen_q: int = 1, new_tokens: int = 0, **options: object,
) -> CacheProblem:  # fmt: skip
    attention = Problem(
        "bfloat16", batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, head_dim, 0.1, **options
    )
    return CacheProblem(attention, new_tokens=new_tokens)


def declared(name: str, header: str) -> list[str]:
    """Names of a struct's fields as they stand in a header."""
    text = (kernels_root() / "attention" / header).read_text()
    body = re.search(rf"struct {name} {{\n(.*?)\n}};", text, re.DOTALL)
    assert body is not None
    return re.findall(r"^  (?:const )?\w+\*? (\w+)(?:\[\d+\])?;", body[1], re.MULTILINE)


def test_structs_are_those_of_the_kernels() -> None:
    params = list(config_decode.CACHE_PARAMS.names or ())
    assert declared("CacheParams", "params_decode.cuh") == params
    for config in (config_decode.DecodeConfig, config_decode.AppendConfig):
        names = [field.name for field in fields(config)]
        assert declared(config.__name__, "config_decode.cuh") == names


@pytest.mark.parametrize("arch", ARCHS)
def test_every_shape_fits_every_device(arch: str) -> None:
    device = Device.known(arch)
    for head_dim in range(32, 257, 32):
        for seqlen_q in (1, 4, 7, 64):
            tile = tile_of(problem_of(head_dim=head_dim, seqlen_q=seqlen_q), device)
            memory = tile.shared_memory(head_dim, head_dim)
            assert tile.blocks * (memory + 1024) <= device.shared_memory_per_block_optin + 1024
            assert tile.stages >= 2 and tile.threads <= 128
            assert FIXED_SPLIT_KEYS % tile.keys == 0


def test_enough_is_under_way() -> None:
    """28 KB a multiprocessor are what 4.2 TB/s take in 0.9 us, of which each has 1/132."""
    for head_dim in (64, 128, 192, 256):
        tile = tile_of(problem_of(head_dim=head_dim), H100)
        assert tile.blocks * (tile.stages - 1) * tile.keys * head_dim * 4 >= 2 * 28_000


def test_too_little_memory_is_refused() -> None:
    small = replace(H100, shared_memory_per_block_optin=16 << 10)
    with pytest.raises(UnsupportedError, match="head dims 256 and 256 need more shared memory"):
        tile_of(problem_of(head_dim=256), small)


# --- splits ---------------------------------------------------------------------------------------


def test_splits_fill_the_device_once() -> None:
    """One block for each of an H100's 132 multiprocessors is enough; the benchmark's shapes."""
    expected = {
        (1, 131072, 32, 8): 16,  # 8 tasks
        (16, 8192, 32, 8): 1,  # 128
        (64, 8192, 32, 8): 1,  # 512: two waves, nearly full
        (128, 2048, 64, 8): 1,
        (16, 8192, 32, 32): 1,
    }
    for (batch, seqlen_k, heads, heads_kv), splits in expected.items():
        problem = problem_of(batch, seqlen_k, heads, heads_kv)
        assert splits_of(problem, H100, seqlen_k) == Splits(splits)


def test_splits_follow_the_longest_entry_that_the_host_knows() -> None:
    problem = problem_of(1)
    assert splits_of(problem, H100, 64).count == 1
    assert splits_of(problem, H100, 640).count <= 10
    windowed = problem_of(1, window_left=63, window_right=0)
    assert splits_of(windowed, H100, 8192).count == 1


def test_parts_fill_the_multiprocessors() -> None:
    for tasks, steps, fewest, most in ((1, 5000, 100, 128), (8, 7, 7, 7), (100, 1, 1, 1)):
        assert fewest <= choose_splits(tasks, steps, 132, 2) <= most
    # Nine of ten multiprocessors would wait for the last tasks.
    assert choose_splits(140, 128, 132, 2) > 1
    assert choose_splits(264, 128, 132, 2) == 1


def test_given_and_fixed_splits() -> None:
    problem = problem_of(seqlen_k=5000)
    assert splits_of(problem, H100, 100, 7) == Splits(7)
    assert splits_of(problem, H100, 100, 7, True) == Splits(7)  # an entry is cut by its own length
    fixed = splits_of(problem, H100, 100, 0, True)
    assert fixed == Splits(3, FIXED_SPLIT_KEYS)
    # Whatever is in the batch, and however many there are: the same kernel, the same keys.
    alone = splits_of(problem_of(1, seqlen_k=100), H100, 100, 0, True)
    assert alone == Splits(1, FIXED_SPLIT_KEYS)
    assert (
        plan_decode(problem_of(1), H100, alone).config == plan_decode(problem, H100, fixed).config
    )


# --- launches -------------------------------------------------------------------------------------


def test_launches() -> None:
    problem = problem_of(seqlen_q=5)  # 20 rows
    one = plan_decode(problem, H100, Splits(1))
    assert [launch.entry for launch in one.launches] == ["cupyflash_decode"]
    assert one.launch.blocks == 16 * 8 and one.partial_rows == 0
    three = plan_decode(problem, H100, Splits(3))
    assert [launch.blocks for launch in three.launches] == [16 * 8 * 3, 16 * 8 * 20]
    assert three.partial_rows == 16 * 32 * 5 * 3
    many = plan_decode(problem_of(seqlen_q=40), H100, Splits(1))  # 160 rows, three tiles
    assert many.launch.blocks == 16 * 8 * 3


def test_append_launches_a_warp_a_row() -> None:
    problem = problem_of(3, seqlen_q=2, new_tokens=2)
    assert plan_append(problem).launch.blocks == 3 * 2 * 8 / 4
    turned = replace(problem, rotary_dtype="float32")
    assert plan_append(turned).launch.blocks == 3 * (2 * 8 + 2 * 32) / 4


def test_widths_of_access() -> None:
    attention = replace(problem_of().attention, head_dim=64, head_dim_v=20)
    config = plan_decode(CacheProblem(attention), H100, Splits(1)).config
    assert (config.load_width, config.store_width, config.head_dim_v) == (4, 4, 32)
    assert plan_decode(CacheProblem(attention), H100, Splits(1), 2).config.load_width == 1


# --- FP8 caches -----------------------------------------------------------------------------------

FLOAT8 = {"kv_dtype": "float8_e4m3fn"}


@pytest.mark.parametrize("arch", ARCHS)
def test_copies_of_a_float8_cache_keep_the_memory_busy(arch: str) -> None:
    """28 KB on the road to each multiprocessor: see tiles_decode."""
    device = Device.known(arch)
    for head_dim in (64, 128, 192, 256):
        for seqlen_q in (1, 7, 64):
            tile = tile_of(problem_of(head_dim=head_dim, seqlen_q=seqlen_q, **FLOAT8), device)
            step = tile.keys * 2 * head_dim
            assert (tile.stages - 1) * step * tile.blocks >= 28 << 10


def test_rows_of_a_float8_cache_are_whole_pieces_of_64_bytes() -> None:
    attention = replace(problem_of(**FLOAT8).attention, head_dim=40, head_dim_v=72)
    config = plan_decode(CacheProblem(attention), H100, Splits(1)).config
    assert (config.head_dim, config.head_dim_v) == (64, 128)
    assert (config.load_width, config.cache_width) == (8, 8)
    for vector_bytes, width in ((16, 8), (4, 4), (2, 1), (1, 1)):  # cp.async moves 4 bytes at least
        plan = plan_decode(CacheProblem(attention), H100, Splits(1), vector_bytes)
        assert plan.config.cache_width == width


def test_factors_that_only_the_device_knows_are_no_part_of_the_exponent() -> None:
    problem = problem_of(**FLOAT8)
    for unknown in (False, True):
        config = plan_decode(replace(problem, key_factors=unknown), H100, Splits(1)).config
        assert config.raw_scores != unknown


def test_append_reads_new_tokens_and_writes_the_cache() -> None:
    problem = problem_of(new_tokens=1, **FLOAT8)
    for new_dtype, width in ((None, 16), ("bfloat16", 8)):
        config = plan_append(replace(problem, new_dtype=new_dtype)).config
        assert (config.dtype, config.kv_dtype) == (new_dtype or "float8_e4m3fn", "float8_e4m3fn")
        assert config.width == width
