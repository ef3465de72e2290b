"""``bench --decode``: one new query an entry against a long cache, as generation asks for it.

The floor is memory: all keys and values are read once, at the speed that a copy reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

import cupyflash
from cupyflash._arrays import place_of
from cupyflash._cuda.device import require_cupy
from cupyflash.bench.inputs import TOLERANCE, disagreement, normal
from cupyflash.bench.runner import Work
from cupyflash.bench.torch_peers import cannot_import, cupy_arrays, sdpa
from cupyflash.quantize import quantize_fp8

__all__ = ["SHAPES", "Cache", "DecodeResult", "DecodeShape", "copy_speed", "draw", "measure"]

Array = Any

_ITEMSIZE = 2
_COPY_BYTES = 1 << 30
PAGE_SIZES = (16, 64, 256)
CONTIGUOUS = "contiguous"


@dataclass(frozen=True)
class DecodeShape:
    """A batch of full caches, and one query for each."""

    batch: int
    seqlen_k: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """Return what stands in tables."""
        heads = f"{self.num_heads}/{self.num_heads_kv}"
        return f"{self.batch} x {self.seqlen_k} x {heads} x {self.head_dim}"

    @property
    def bytes(self) -> int:
        """Bytes of keys and values."""
        rows = self.batch * self.seqlen_k * self.num_heads_kv
        return 2 * rows * self.head_dim * _ITEMSIZE


SHAPES = (
    DecodeShape(1, 131072, 32, 8, 128),
    DecodeShape(16, 8192, 32, 8, 128),
    DecodeShape(64, 8192, 32, 8, 128),
    DecodeShape(128, 2048, 64, 8, 128),
    DecodeShape(16, 8192, 32, 32, 128),
)


@dataclass(frozen=True, eq=False)
class Cache:
    """Arrays of a shape on the device."""

    query: Array  # (b, 1, h, d)
    key: Array  # (b, sk, hk, d)
    value: Array
    lengths: Array  # int32 (b,)
    descales: Mapping[str, Array] = field(default_factory=dict)  # of an FP8 cache


@dataclass(frozen=True)
class DecodeResult:
    """What someone took for a shape; either the times or `error` are given."""

    shape: str
    contender: str
    milliseconds: float | None = None
    host_microseconds: float | None = None
    gigabytes_per_second: float | None = None
    share_of_copy: float | None = None
    over_contiguous: float | None = None  # our time over that of our contiguous call
    error: str | None = None


@dataclass(frozen=True)
class Contender:
    """Someone who decodes: `array` makes ``(b, 1, h, d)`` of what a prepared work returns."""

    name: str
    prepare: Callable[[Cache], Work]
    missing: Callable[[], str | None] = lambda: None
    array: Callable[[Any], Array] = lambda result: result
    float8: bool = False  # reads the cache in FP8, half the bytes


def draw(shape: DecodeShape) -> Cache:
    """Return random keys, values and queries; entries are full, and only the device knows."""
    tokens = (shape.batch, shape.seqlen_k, shape.num_heads_kv, shape.head_dim)
    query = normal((shape.batch, 1, shape.num_heads, shape.head_dim), shape.dtype)
    key, value = (normal(tokens, shape.dtype) for _ in range(2))
    lengths = place_of(query).namespace.full(shape.batch, shape.seqlen_k, "int32")
    return Cache(query, key, value, lengths)


def ours(page_size: int | None) -> Contender:
    """cupyflash, on the cache as it is or cut into pages that lie in any order."""
    attend = cupyflash.flash_attention_with_kvcache

    def contiguous(cache: Cache) -> Work:
        return lambda: attend(
            cache.query, cache.key, cache.value, cache_seqlens=cache.lengths, **cache.descales
        )

    def paged(cache: Cache) -> Work:
        table, (key, value) = _pages(cache, page_size or 1)
        return lambda: attend(
            cache.query, key, value, cache_seqlens=cache.lengths, page_table=table, **cache.descales
        )

    if page_size is None:
        return Contender(CONTIGUOUS, contiguous)
    return Contender(f"page {page_size}", paged)


def in_float8(contender: Contender) -> Contender:
    """The same on the cache in FP8, with a scale a head."""

    def prepare(cache: Cache) -> Work:
        (key, k_descale), (value, v_descale) = map(quantize_fp8, (cache.key, cache.value))
        descales = {"k_descale": k_descale, "v_descale": v_descale}
        return contender.prepare(Cache(cache.query, key, value, cache.lengths, descales))

    return replace(contender, name=f"FP8, {contender.name}", prepare=prepare, float8=True)


def _pages(cache: Cache, size: int) -> tuple[Array, list[Array]]:
    """Return a page table ``(b, pages)``, and keys and values in that order."""
    xp = place_of(cache.key).namespace
    batch, seqlen_k, *row = cache.key.shape
    pages = seqlen_k // size
    if pages * size != seqlen_k:
        raise ValueError(f"{seqlen_k} tokens are no whole number of pages of {size}")
    order = np.random.default_rng(0).permutation(batch * pages)
    table = np.empty(batch * pages, np.int32)
    table[order] = np.arange(batch * pages)
    arrays = []
    for tokens in (cache.key, cache.value):
        bits = tokens.view(f"u{tokens.dtype.itemsize}").reshape(-1, size, *row)
        arrays.append(bits[xp.asarray(order)].view(tokens.dtype))
    return xp.asarray(table.reshape(batch, pages)), arrays


def _flash_attn_3(cache: Cache) -> Work:
    function = import_module("flash_attn_interface").flash_attn_with_kvcache
    from_dlpack = import_module("torch").from_dlpack
    query, key, value, lengths = map(
        from_dlpack, (cache.query, cache.key, cache.value, cache.lengths)
    )
    return lambda: function(query, key, value, cache_seqlens=lengths, causal=True)


def _torch_flash(cache: Cache) -> Work:
    from_dlpack, attend = import_module("torch").from_dlpack, sdpa("FLASH_ATTENTION")()
    query, key, value = map(from_dlpack, (cache.query, cache.key, cache.value))
    return lambda: attend(query, key, value, False)


def _first(result: Any) -> Array:
    return cupy_arrays(result)[0]


OURS = (ours(None), *map(ours, PAGE_SIZES), in_float8(ours(None)), in_float8(ours(PAGE_SIZES[-1])))
PEERS = (
    Contender("fa3", _flash_attn_3, partial(cannot_import, "flash_attn_interface"), _first),
    Contender("torch-flash", _torch_flash, partial(cannot_import, "torch"), _first),
)


def measure(
    shape: DecodeShape,
    cache: Cache,
    contenders: Sequence[Contender],
    copy: float,
    milliseconds: Callable[[Mapping[str, Work]], Mapping[str, float]],
    microseconds: Callable[[Work], float],
) -> list[DecodeResult]:
    """Return a result for each contender; those that are right take turns.

    Parameters
    ----------
    shape, cache
        What is computed.
    contenders : sequence of Contender
    copy : float
        Bytes a second, read and written, that a copy reaches.
    milliseconds, microseconds : callable
        As in `runner.Stopwatch`, and `timing.host_microseconds`.
    """
    works: dict[str, Work] = {}
    errors: dict[str, str] = {}
    expected = _last_entry(shape, cache)

    def prepare(contender: Contender) -> None:
        try:
            work = contender.prepare(cache)
            found = contender.array(work())
            error = disagreement([_host(found[-1, 0])], [expected])
            if not error <= TOLERANCE["float8_e4m3fn" if contender.float8 else shape.dtype]:
                raise ArithmeticError(f"wrong by {error:.2g} of the norm")
            works[contender.name] = work
        except Exception as error:  # the table is to be whole whatever one of them does
            errors[contender.name] = f"{type(error).__name__}: {error}"

    for each in contenders:
        prepare(each)
    times = milliseconds(works) if works else {}

    def result(contender: Contender) -> DecodeResult:
        name = contender.name
        if name in errors:
            return DecodeResult(shape.name, name, error=errors[name])
        speed = shape.bytes / (2 if contender.float8 else 1) / times[name] * 1e3
        paged = name.startswith("page ") and CONTIGUOUS in times
        return DecodeResult(
            shape.name,
            name,
            times[name],
            microseconds(works[name]),
            speed / 1e9,
            speed / copy,
            times[name] / times[CONTIGUOUS] if paged else None,
        )

    return list(map(result, contenders))


def _last_entry(shape: DecodeShape, cache: Cache) -> Array:
    """Return out ``(h, d)`` of the last entry, dense in float64 on the host."""
    query, key, value = (_host(x[-1]) for x in (cache.query, cache.key, cache.value))
    query = query[0].reshape(shape.num_heads_kv, -1, shape.head_dim)
    scores = np.einsum("ngd,snd->ngs", query, key) * shape.head_dim**-0.5
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("ngs,snd->ngd", weights, value).reshape(-1, shape.head_dim)


def _host(array: Array) -> Array:
    return (array.get() if hasattr(array, "get") else array).astype(np.float64)


def copy_speed(milliseconds: Callable[[Mapping[str, Work]], Mapping[str, float]]) -> float:
    """Return the bytes a second, read and written, of a copy of 1 GiB on the device."""
    cupy = require_cupy()
    source, target = (cupy.empty(_COPY_BYTES, "uint8") for _ in range(2))
    times = milliseconds({"copy": lambda: cupy.copyto(target, source)})
    return 2 * _COPY_BYTES / times["copy"] * 1e3


def present(names: Sequence[str]) -> tuple[list[Contender], dict[str, str]]:
    """Return ours and those peers of these names who can run here; for the others the reason."""
    wanted = [each for each in PEERS if each.name in names or "all" in names]
    reasons = {each.name: each.missing() for each in wanted}
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    return [*OURS, *(each for each in wanted if each.name not in left_out)], left_out


def title(device: str, copy: float) -> str:
    """Return what stands above the table."""
    return f"{device}: one query, bfloat16; a copy reaches {copy / 1e9:.0f} GB/s"


def header() -> str:
    """Return the first lines of the table."""
    names = "shape (b x sk x h/hk x d)", "who", "ms", "GB/s", "of copy", "of contiguous", "host us"
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def line(result: DecodeResult) -> str:
    """Return a row of the table."""
    start = f"| {result.shape} | {result.contender} |"
    if result.error is not None:
        return f"{start} {' '.join(result.error.split())[:200]} |"
    over = "" if result.over_contiguous is None else f"{result.over_contiguous:.3f}"
    return (
        f"{start} {result.milliseconds:.4f} | {result.gigabytes_per_second:.0f} |"
        f" {result.share_of_copy:.3f} | {over} | {result.host_microseconds:.1f} |"
    )


def to_json(
    results: Sequence[DecodeResult], machine: Mapping[str, Any], copy: float
) -> dict[str, Any]:
    """Return everything."""
    return {
        "machine": dict(machine),
        "copy_gigabytes_per_second": copy / 1e9,
        "results": [asdict(each) for each in results],
    }
