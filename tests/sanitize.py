"""Small calls for compute-sanitizer to watch: every tile path of every GPU engine.

For each tool among memcheck, racecheck, synccheck and initcheck::

    compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.sanitize

Names of engines after that leave out the others, and ``cache`` is that of key-value caches. As
racecheck takes its time, ``simt:0`` to ``simt:5`` are parts of an engine's calls, one dtype and
shape each, which may run side by side; ``turns`` is a part of mma's.
Each array has an allocation of its own, so that memcheck sees every byte that is read or written
beyond one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from itertools import product
from typing import Any

import cupy
import numpy as np

from cupyflash import (
    BlockMask,
    Tiling,
    flash_attention,
    flash_attention_backward,
    flash_attention_forward,
    flash_attention_with_kvcache,
    quantize_fp8,
)
from cupyflash import flash_attention_varlen_forward as varlen_forward
from cupyflash.errors import UnsupportedError

ENGINES = ("simt", "mma", "wgmma")
DTYPES = (np.float16, np.float32)  # converted on the way to shared memory, and copied there
SHAPES = (  # sq, sk, h, hk, d, dv: more than one tile, ragged ends; racecheck takes its time
    (150, 133, 2, 1, 64, 64),
    (65, 70, 1, 1, 59, 37),
    (40, 70, 1, 1, 256, 128),
)


def main(chosen: Collection[str] = (*ENGINES, "cache")) -> None:
    """Run everything once; the sanitizer reports what it sees."""
    cupy.cuda.set_allocator(None)
    calls = 0
    cases = enumerate(product(DTYPES, SHAPES))
    for engine, (number, (dtype, shape)) in product(ENGINES, cases):
        if not {engine, f"{engine}:{number}"} & {*chosen}:
            continue
        seqlen_q, seqlen_k, heads, heads_kv, head_dim, head_dim_v = shape
        query, key, value, grad_out = (
            draw(dims, dtype)
            for dims in (
                (1, seqlen_q, heads, head_dim),
                (1, seqlen_k, heads_kv, head_dim),
                (1, seqlen_k, heads_kv, head_dim_v),
                (1, seqlen_q, heads, head_dim_v),
            )
        )
        cu_seqlens_q = cupy.asarray([0, 3, 3, seqlen_q - 1], "int32")
        cu_seqlens_k = cupy.asarray([0, 0, 30, seqlen_k - 2], "int32")
        packed = (query[0], key[0], value[0], cu_seqlens_q, cu_seqlens_k)
        for options in changes(heads, seqlen_q, seqlen_k):
            try:
                _, saved = flash_attention_forward(query, key, value, engine=engine, **options)
                flash_attention_backward(grad_out, saved, dlse=cupy.ones_like(saved.lse))
                flash_attention_backward(grad_out, saved, deterministic=True)
                calls += 3
                if "block_mask" in options:
                    continue
                options = {name: several(x) for name, x in options.items()}
                _, saved = varlen_forward(*packed, engine=engine, **options)
                flash_attention_backward(grad_out[0], saved)
                calls += 2
            except UnsupportedError:
                continue
    if "cache" in chosen:
        calls += watch_caches() + watch_caches(cached_as_float8) + watch_pages()
    if {"mma", "turns"} & {*chosen}:
        calls += watch_turns()
    if "wgmma" in chosen:
        calls += watch_float8() + watch_whole_heads() + watch_many_keys() + watch_bias()
    cupy.cuda.runtime.deviceSynchronize()
    print(f"{calls} calls watched")


def watch_caches(cached: Callable[[Any], Any] = lambda x: x) -> int:
    """Steps of generation with one new token and with several, in one piece and in pages."""
    batch, heads, heads_kv, dim, page, pages = 3, 4, 2, 64, 16, 8
    lengths = cupy.asarray([0, 77, page * pages - 3], "int32")  # the last has no room for all
    table = cupy.random.permutation(batch * pages).reshape(batch, pages).astype("int32")
    angles = cupy.random.random_sample((page * pages, dim // 4)).astype("float32")
    calls = 0
    for tokens, page_table, splits in product((1, 5), (None, table), (1, 3)):
        shape = (batch, page * pages) if page_table is None else (batch * pages, page)
        caches = [cached(draw((*shape, heads_kv, dim), np.float16)) for _ in range(2)]
        key, value = draw((2, batch, tokens, heads_kv, dim), np.float16)
        flash_attention_with_kvcache(
            draw((batch, tokens, heads, dim), np.float16), *caches, k=key, v=value,
            cache_seqlens=lengths, page_table=page_table, causal=True, num_splits=splits,
            rotary_cos=cupy.cos(angles), rotary_sin=cupy.sin(angles),
        )  # fmt: skip
        calls += 1
    return calls


def watch_pages() -> int:
    """Pages that hold all keys of a step, for so many steps that the table is asked again."""
    pages, page, dim = 160, 64, 32
    table = cupy.random.permutation(pages).reshape(1, pages).astype("int32")
    caches = draw((2, pages, page, 1, dim), np.float16)
    lengths = cupy.asarray([pages * page - 5], "int32")
    for leftpad in (0, 130):
        flash_attention_with_kvcache(
            draw((1, 1, 2, dim), np.float16), *caches, cache_seqlens=lengths, page_table=table,
            cache_leftpad=cupy.asarray([leftpad], "int32"), num_splits=1,
        )  # fmt: skip
    return 2


def cached_as_float8(x: Any) -> Any:
    """A cache of the same numbers in FP8."""
    return quantize_fp8(x)[0]


def watch_turns() -> int:
    """The forward of mma where groups of warps multiply in turns: two key tiles, and more."""
    sizes = ((64, 256, 64), (128, 256, 32), (256, 128, 48))
    features = ({}, {"causal": True}, {"softcap": 30.0, "dropout_p": 0.1})
    for (head_dim, block_m, block_n), options in product(sizes, features):
        for seqlen_k in (2 * block_n, 5 * block_n - 3):
            query = draw((1, block_m + 50, 2, head_dim), np.float16)
            key, value = draw((2, 1, seqlen_k, 1, head_dim), np.float16)
            tiling = Tiling(block_m, block_n, 2, 8)
            flash_attention(query, key, value, engine="mma", tiling=tiling, **options)
    return 2 * len(sizes) * len(features)


def watch_float8() -> int:
    """FP8 with every head dim of `SHAPES`, and with the tiles of more keys."""
    shapes = (
        *SHAPES,
        (190, 600, 2, 1, 64, 64),
        (190, 600, 2, 1, 128, 128),
        (190, 1600, 1, 1, 64, 64),
    )
    for seqlen_q, seqlen_k, heads, heads_kv, head_dim, head_dim_v in shapes:
        (query, q_descale), (key, k_descale), (value, v_descale) = (
            quantize_fp8(draw((1, *dims), np.float32), num_heads_kv=heads_kv)
            for dims in (
                (seqlen_q, heads, head_dim),
                (seqlen_k, heads_kv, head_dim),
                (seqlen_k, heads_kv, head_dim_v),
            )
        )
        descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
        flash_attention(query, key, value, causal=True, **descales)
    return len(shapes)


def watch_whole_heads() -> int:
    """The backward of as many heads as Hopper's multiprocessors, each with several key tiles."""
    heads = cupy.cuda.Device().attributes["MultiProcessorCount"]
    for head_dim in (64, 128):
        query, key, value, grad_out = draw((4, heads, 150, 1, head_dim), np.float16)
        _, saved = flash_attention_forward(query, key, value, causal=True)
        flash_attention_backward(grad_out, saved)
    return 4


def watch_many_keys() -> int:
    """Head dim 128 has other tiles for more keys."""
    for seqlen_k, causal in ((200, True), (2100, False), (4200, True)):
        query = draw((1, 190, 1, 128), np.float16)
        key, value = draw((2, 1, seqlen_k, 1, 128), np.float16)
        flash_attention(query, key, value, causal=causal)
    return 3


def watch_bias() -> int:
    """A bias that Hopper's copy engine reads, and mma's forward again where it hides NaN."""
    seqlen_q, seqlen_k, heads = 290, 264, 2
    bias = draw((1, heads, seqlen_q, seqlen_k), np.float16)
    bias[..., 30:40] = -np.inf
    features = ({}, {"causal": True, "alibi_slopes": draw((heads,), np.float32)}, {"softcap": 5.0})
    for head_dim, options in product((64, 128, 192, 256), features):
        query = draw((2, seqlen_q, heads, head_dim), np.float16)
        key, value = draw((2, 2, seqlen_k, heads, head_dim), np.float16)
        flash_attention(query, key, value, bias=bias, engine="wgmma", **options)
        value[:, 30:40] = np.nan
        flash_attention(query, key, value, bias=bias, engine="wgmma", **options)
    return 2 * 4 * len(features)


def changes(heads: int, seqlen_q: int, seqlen_k: int) -> Iterator[dict[str, Any]]:
    """Options of calls, with arrays at full length and broadcast ones."""
    yield {}
    yield {"window": (20, 0)}
    yield {"softcap": 5.0, "causal": True, "sinks": draw((heads,), np.float32)}
    seed = cupy.asarray([7], "uint64")
    mask = cupy.random.random_sample((1, heads, seqlen_q, seqlen_k)) < 0.7
    bias = draw((heads, 1, seqlen_k), np.float32)
    yield {"mask": mask, "bias": bias, "dropout_p": 0.3, "seed": seed}
    yield {"mask": mask[:, :1, :1], "bias": draw((1, heads, seqlen_q, seqlen_k), np.float64)}
    slopes = draw((heads,), np.float32)
    bias = draw((1, heads, seqlen_q, seqlen_k), np.float16)
    yield {"bias": bias, "softcap": 5.0, "alibi_slopes": slopes, "causal": True}
    yield {"bias": bias[..., :1], "softcap": 5.0, "mask": mask}
    yield {"bias": bias[:, :1]}
    blocks = cupy.random.random_sample((1, heads, -(-seqlen_q // 40), -(-seqlen_k // 24))) < 0.5
    yield {"block_mask": BlockMask(blocks, (40, 24), mask[0, 0]), "causal": True}


def several(x: Any) -> Any:
    """An array of one sequence as one of the three varlen entries."""
    return cupy.concatenate([x] * 3) if getattr(x, "ndim", 0) == 4 else x


def draw(shape: tuple[int, ...], dtype: Any) -> Any:
    """Standard normal values."""
    return cupy.random.standard_normal(shape, cupy.float32).astype(dtype)


if __name__ == "__main__":
    main(sys.argv[1:] or (*ENGINES, "cache"))
