"""Drop-in names against the core and the dense reference; signatures are the originals'."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import compat
from tests.reference import attention, attention_varlen
from tests.tolerance import assert_result

COMMON = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"(q, k, v, {COMMON})",
    "flash_attn_qkvpacked_func": f"(qkv, {COMMON})",
    "flash_attn_kvpacked_func": f"(q, kv, {COMMON})",
    "flash_attn_varlen_func": f"(q, k, v, {LENGTHS}, {COMMON}, block_table=None)",
    "flash_attn_varlen_qkvpacked_func": f"(qkv, cu_seqlens, max_seqlen, {COMMON})",
    "flash_attn_varlen_kvpacked_func": f"(q, kv, {LENGTHS}, {COMMON})",
    "flash_attn_with_kvcache": "(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, "
    "rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, "
    "block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False)",
    "scaled_dot_product_attention": "(query, key, value, attn_mask=None, dropout_p=0.0, "
    "is_causal=False, scale=None, enable_gqa=False)",
}
# flash-attn's options, and the same in the reference's words.
OPTIONS = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "scale": ({"softmax_scale": -0.3}, {"softmax_scale": -0.3}),
    "softcap": ({"softcap": 1.5}, {"softcap": 1.5}),
    "softcap off": ({"softcap": -2.0}, {}),
    "window": ({"window_size": (3, 2)}, {"window": (3, 2)}),
    "left side open": ({"window_size": (-1, 0)}, {"window": (None, 0)}),
    "right side open": ({"window_size": (0, -1)}, {"window": (0, None)}),
    "causal window": ({"window_size": (4, -1), "causal": True}, {"window": (4, 0)}),
    "alibi": ({"alibi_slopes": np.float32([0.5, 0.1, 0, 2])},) * 2,
    "deterministic": ({"deterministic": True}, {}),
}
LENGTHS_Q, LENGTHS_K = [3, 0, 8], [5, 2, 6]


def draw(rng: np.random.Generator, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


def offsets(lengths: list[int]) -> np.ndarray:
    return np.cumsum([0, *lengths], dtype=np.int32)


def assert_right(result: Any, options: dict[str, Any], *arrays: Any) -> None:
    """`result` is ``(out, lse, None)`` of the dense formula; `arrays`: q, k, v, cu_seqlens."""
    dense = attention if len(arrays) == 3 else attention_varlen
    right, naive = (dense(*arrays, **options, dtype=dtype) for dtype in (np.float64, np.float32))
    out, lse, probabilities = result
    assert_result("out", out, right, naive)
    assert_result("lse", lse, right, naive)
    assert probabilities is None


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_the_originals(name: str) -> None:
    signature = inspect.signature(getattr(compat, name))
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == SIGNATURES[name]
    assert name in compat.__all__


@pytest.mark.parametrize("case", OPTIONS)
def test_flash_attn_func(rng: np.random.Generator, case: str) -> None:
    given, meant = OPTIONS[case]
    q, k, v = draw(rng, (2, 9, 4, 16), (2, 13, 2, 16), (2, 13, 2, 16))
    result = compat.flash_attn_func(q, k, v, **given, return_attn_probs=True)
    assert_right(result, meant, q, k, v)
    np.testing.assert_array_equal(compat.flash_attn_func(q, k, v, **given), result[0])
    packed = compat.flash_attn_kvpacked_func(
        q, np.stack([k, v], axis=2), **given, return_attn_probs=True
    )
    for got, expected in zip(packed[:2], result[:2], strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("case", OPTIONS)
def test_flash_attn_qkvpacked_func(rng: np.random.Generator, case: str) -> None:
    given, meant = OPTIONS[case]
    (qkv,) = draw(rng, (2, 9, 3, 4, 16))
    result = compat.flash_attn_qkvpacked_func(qkv, **given, return_attn_probs=True)
    assert_right(result, meant, *(qkv[:, :, part] for part in range(3)))
    np.testing.assert_array_equal(compat.flash_attn_qkvpacked_func(qkv, **given), result[0])


@pytest.mark.parametrize("case", OPTIONS)
def test_flash_attn_varlen_func(rng: np.random.Generator, case: str) -> None:
    given, meant = OPTIONS[case]
    q, k, v = draw(rng, (11, 4, 16), (13, 2, 16), (13, 2, 16))
    lengths = offsets(LENGTHS_Q), offsets(LENGTHS_K)
    result = compat.flash_attn_varlen_func(q, k, v, *lengths, 8, 6, **given, return_attn_probs=True)
    assert_right(result, meant, q, k, v, *lengths)
    out = compat.flash_attn_varlen_kvpacked_func(
        q, np.stack([k, v], axis=1), *lengths, 8, 6, **given
    )
    np.testing.assert_array_equal(out, result[0])


@pytest.mark.parametrize("case", OPTIONS)
def test_flash_attn_varlen_qkvpacked_func(rng: np.random.Generator, case: str) -> None:
    given, meant = OPTIONS[case]
    (qkv,) = draw(rng, (11, 3, 4, 16))
    lengths = offsets(LENGTHS_Q)
    result = compat.flash_attn_varlen_qkvpacked_func(
        qkv, lengths, 8, **given, return_attn_probs=True
    )
    assert_right(result, meant, *(qkv[:, part] for part in range(3)), lengths, lengths)


def test_dropout_is_applied_and_lse_ignores_it(rng: np.random.Generator) -> None:
    q, k, v = draw(rng, (1, 32, 4, 8), (1, 32, 4, 8), (1, 32, 4, 8))
    whole, lse, _ = compat.flash_attn_func(q, k, v, return_attn_probs=True)
    first, dropped_lse, _ = compat.flash_attn_func(q, k, v, 0.5, return_attn_probs=True)
    second = compat.flash_attn_func(q, k, v, 0.5)
    np.testing.assert_array_equal(dropped_lse, lse)
    assert not np.array_equal(first, whole)
    assert not np.array_equal(first, second)
    assert not np.array_equal(
        compat.scaled_dot_product_attention(q, k, v, dropout_p=0.5),
        compat.scaled_dot_product_attention(q, k, v),
    )


@pytest.mark.parametrize("window_size", [(-2, 0), (0, -3), (1, 2, 3), (5,)])
def test_wrong_windows_raise(rng: np.random.Generator, window_size: Any) -> None:
    q, k, v = draw(rng, (1, 4, 1, 8), (1, 4, 1, 8), (1, 4, 1, 8))
    with pytest.raises(ValueError, match="window_size"):
        compat.flash_attn_func(q, k, v, window_size=window_size)


def test_wrong_arguments_raise(rng: np.random.Generator) -> None:
    q, k, v = draw(rng, (1, 4, 1, 8), (1, 4, 1, 8), (1, 4, 1, 8))
    (packed,) = draw(rng, (1, 4, 2, 1, 8))
    with pytest.raises(TypeError, match="window_size"):
        compat.flash_attn_func(q, k, v, window_size=None)
    with pytest.raises(ValueError, match="softcap"):
        compat.flash_attn_func(q, k, v, softcap=float("nan"))
    with pytest.raises(ValueError, match=r"qkv .* of size 3"):
        compat.flash_attn_qkvpacked_func(packed)
    with pytest.raises(ValueError, match="kv must have 5 axes"):
        compat.flash_attn_kvpacked_func(q, packed[0])
    lengths, pages = offsets([4]), np.zeros((1, 1), np.int32)
    with pytest.raises(cupyflash.UnsupportedError, match="block_table"):
        compat.flash_attn_varlen_func(q[0], k[0], v[0], *(lengths,) * 2, 4, 4, block_table=pages)


FLAGS = [
    (name, flag)
    for name in SIGNATURES
    for flag in inspect.signature(getattr(compat, name)).parameters
    if flag in ("causal", "deterministic", "enable_gqa", "is_causal", "rotary_interleaved")
    or flag.startswith("return_")
]


@pytest.mark.parametrize(("name", "flag"), FLAGS)
def test_flags_are_bools(rng: np.random.Generator, name: str, flag: str) -> None:
    q, k, v, qkv, kv = draw(rng, *[(1, 4, 1, 8)] * 3, (1, 4, 3, 1, 8), (1, 4, 2, 1, 8))
    arrays = {
        "query": q, "key": k, "value": v, "q": q, "k": k, "v": v, "qkv": qkv, "kv": kv,
        "k_cache": k.copy(), "v_cache": v.copy(), "cache_seqlens": 0,
    }  # fmt: skip
    if "varlen" in name:
        arrays = {n: x[0] if n != "cache_seqlens" else x for n, x in arrays.items()}
        arrays |= dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"), offsets([4]))
        arrays |= dict.fromkeys(("max_seqlen", "max_seqlen_q", "max_seqlen_k"), 4)
    function = getattr(compat, name)
    given = {n: arrays[n] for n in inspect.signature(function).parameters if n in arrays}
    for wrong in ("False", 1, None, np.ones(1, bool)):
        with pytest.raises((TypeError, ValueError), match=f"^{flag} must be True"):
            function(**given, **{flag: wrong})
    for right in (True, np.bool_(True)):
        function(**given, **{flag: right})


def assert_sdpa(out: Any, query: Any, key: Any, value: Any, mask: Any, scale: Any) -> None:
    """`out` is the dense formula's; the axes in front of the heads become the batch."""
    *leads, seqlen_q, _ = query.shape if query.ndim > 2 else (1, *query.shape)
    batch, heads = int(np.prod(leads[:-1])), leads[-1]

    def batched(x: Any) -> Any:
        heads_of_x = x.shape[-3] if x.ndim > 2 else 1
        return x.reshape(batch, heads_of_x, *x.shape[-2:]).swapaxes(1, 2)

    options = {"softmax_scale": scale}
    if mask is not None:
        spread = np.broadcast_to(mask, (*leads, seqlen_q, key.shape[-2]))
        name = "mask" if mask.dtype == bool else "bias"
        options[name] = spread.reshape(batch, heads, *spread.shape[-2:])
    arrays = [batched(x) for x in (query, key, value)]
    right, naive = (
        attention(*arrays, **options, dtype=dtype) for dtype in (np.float64, np.float32)
    )
    assert_result("out", batched(out), right, naive)


@pytest.mark.parametrize("leads", [None, (), (3,), (2, 3), (0,), (2, 1, 2)])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float", "scale"])
def test_sdpa(rng: np.random.Generator, leads: tuple[int, ...] | None, kind: str) -> None:
    heads = () if leads is None else (*leads, 4)
    query, key, value = draw(rng, (*heads, 7, 16), (*heads, 11, 16), (*heads, 11, 5))
    options: dict[str, Any] = {}
    mask = None
    if kind == "causal":
        options["is_causal"], mask = True, np.tri(7, 11, dtype=bool)
    elif kind == "bool":
        mask = options["attn_mask"] = rng.random((7, 11)) < 0.5
        mask[2] = False
    elif kind == "float":
        (mask,) = draw(rng, (*heads, 7, 11))
        mask[..., :4] = -np.inf
        options["attn_mask"] = mask
    elif kind == "scale":
        options["scale"] = 0.7
    out = compat.scaled_dot_product_attention(query, key, value, **options)
    assert_sdpa(out, query, key, value, mask, options.get("scale"))
    if kind == "bool":
        assert not out[..., 2, :].any()


@pytest.mark.parametrize(
    "shape",
    [(), (11,), (7, 1), (4, 7, 11), (1, 4, 1, 11), (3, 1, 1, 11), (2, 1, 4, 1, 1), (2, 3, 1, 7, 1)],
)
def test_sdpa_masks_broadcast(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    query, key, value = draw(rng, (2, 3, 4, 7, 16), (2, 3, 2, 11, 16), (2, 3, 2, 11, 16))
    mask = np.asarray(rng.random(shape) < 0.6)
    out = compat.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    assert_sdpa(out, query, key, value, mask, None)


def test_sdpa_takes_any_strides(rng: np.random.Generator) -> None:
    (packed,) = draw(rng, (2, 7, 3, 3, 4, 16))  # leads in front of and behind the sequence
    query, key, value = (np.moveaxis(packed[:, :, part], 1, -2) for part in range(3))
    out = compat.scaled_dot_product_attention(query, key, value)
    dense = compat.scaled_dot_product_attention(*map(np.ascontiguousarray, (query, key, value)))
    np.testing.assert_array_equal(out, dense)


def test_sdpa_wrong_arguments_raise(rng: np.random.Generator) -> None:
    sdpa = compat.scaled_dot_product_attention
    query, key, value = draw(rng, (2, 4, 7, 16), (2, 2, 11, 16), (2, 2, 11, 16))
    mask = np.ones((7, 11), bool)
    with pytest.raises(ValueError, match="attn_mask and is_causal"):
        sdpa(query, query, query, mask, is_causal=True)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        sdpa(query, key, value)
    with pytest.raises(ValueError, match="axes before the heads"):
        sdpa(query, key[:1], value, enable_gqa=True)
    with pytest.raises(ValueError, match="number of axes"):
        sdpa(query, key[0], value, enable_gqa=True)
    for shape in ((7, 12), (1, 2, 4, 7, 11), (3, 1, 7, 11)):
        with pytest.raises(ValueError, match="attn_mask must broadcast"):
            sdpa(query, key, value, np.ones(shape, bool), enable_gqa=True)
    with pytest.raises(ValueError, match="query and key need the same last axis"):
        sdpa(query, key[..., :12], value, enable_gqa=True)
    for other in (value[:, :, :9], value[:, :1]):
        with pytest.raises(ValueError, match="key and value need the same axes"):
            sdpa(query, key, other, enable_gqa=True)
    with pytest.raises(TypeError, match="attn_mask must be bool or floating"):
        sdpa(query, key, value, mask.astype(np.int32), enable_gqa=True)


@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float"])
def test_sdpa_is_pytorchs(rng: np.random.Generator, kind: str) -> None:
    torch = pytest.importorskip("torch")
    arrays = draw(rng, (2, 4, 7, 16), (2, 2, 11, 16), (2, 2, 11, 16))
    options: dict[str, Any] = {"enable_gqa": True, "is_causal": kind == "causal"}
    mask = None
    if kind == "bool":
        mask = rng.random((2, 1, 7, 11)) < 0.7
        mask[..., 0] = True
    elif kind == "float":
        (mask,) = draw(rng, (7, 11))
    tensors = [torch.from_numpy(array) for array in arrays]
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *tensors, None if mask is None else torch.from_numpy(mask), **options
    )
    for inputs in (arrays, tensors):
        out = compat.scaled_dot_product_attention(*inputs, mask, **options)
        np.testing.assert_allclose(out, theirs.numpy(), rtol=1e-5, atol=1e-5)


# --- cache --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_kvcache_options(rng, options):
    """flash-attn's words against the core's; the core's own tests judge the numbers."""
    given, meant = OPTIONS[options]
    given = {name: x for name, x in given.items() if name != "deterministic"}
    q, k, v = draw(rng, (2, 3, 4, 8), (2, 3, 2, 8), (2, 3, 2, 8))
    caches, lengths = draw(rng, (2, 9, 2, 8), (2, 9, 2, 8)), np.int32([2, 6])
    cos, sin = (f(rng.uniform(0, 7, (20, 4))).astype(np.float32) for f in (np.cos, np.sin))
    ours = [x.copy() for x in caches]
    result = compat.flash_attn_with_kvcache(
        q, *caches, k, v, cos, sin, lengths, rotary_interleaved=False, num_splits=2,
        return_softmax_lse=True, **given,
    )  # fmt: skip
    right = cupyflash.flash_attention_with_kvcache(
        q, *ours, k=k, v=v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths,
        rotary_interleaved=False, num_splits=2, return_lse=True,
        **{"causal": False} | meant,
    )  # fmt: skip
    for got, expected in zip((*result, *caches), (*right, *ours), strict=True):
        assert got.tobytes() == expected.tobytes()


def test_kvcache_block_table_and_places(rng):
    q, key, value = draw(rng, (2, 1, 4, 8), (6, 4, 2, 8), (6, 4, 2, 8))
    table, lengths, pad = np.int32([[5, 0], [3, 1]]), np.int32([7, 8]), np.int32([0, 2])
    out = compat.flash_attn_with_kvcache(
        q, key, value, cache_seqlens=lengths, cache_leftpad=pad, block_table=table, causal=True
    )
    dense = [x[table].reshape(2, 8, 2, 8) for x in (key, value)]
    swapped = [x[::-1].copy() for x in dense]
    chosen = compat.flash_attn_with_kvcache(
        q, *swapped, None, None, None, None, lengths, np.int32([1, 0]), pad, None, causal=True
    )
    assert out.shape == q.shape and np.array_equal(out, chosen)
    for entry, (first, end) in enumerate(zip(pad, lengths, strict=True)):
        keys = slice(first, end)
        arrays = (q[entry : entry + 1], *(x[entry : entry + 1, keys] for x in dense))
        right, naive = (attention(*arrays, dtype=dtype) for dtype in (np.float64, np.float32))
        assert_result("out", out[entry : entry + 1], right, naive)


def test_kvcache_refuses_a_softcap_that_is_no_number(rng):
    q, key, value = draw(rng, (1, 1, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8))
    with pytest.raises(TypeError, match="softcap"):
        compat.flash_attn_with_kvcache(q, key, value, softcap="1")
    with pytest.raises(ValueError, match="window_size"):
        compat.flash_attn_with_kvcache(q, key, value, window_size=(-2, 0))
