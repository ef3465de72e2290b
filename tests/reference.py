"""Attention written out densely: every (b, h, sq, sk) matrix in full, in float64.

This is the judge of the tests and shares nothing with the package. With ``dtype=`` it becomes the
formula as a user without a flash kernel would run it in that type, every result rounded to it
(products of 16-bit inputs accumulate in float32): its error is the yardstick of tolerance.py.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple

import numpy as np

from tests.rounding import deviations

Array = Any


FORWARD = "out", "row_max", "row_sum", "lse"


class Dense(NamedTuple):
    """Everything that one call defines.

    ``dscores`` is the gradient of the final scores. ``noise`` is, by name, how far rounding may
    carry each result of an engine, see rounding.py; only what is computed wider than that has it.
    """

    out: Array
    row_max: Array
    row_sum: Array
    lse: Array
    dq: Array = None
    dk: Array = None
    dv: Array = None
    dbias: Array = None
    dsinks: Array = None
    dscores: Array = None
    noise: Any = None


class Arithmetic:
    """Numbers of one dtype, held exactly in a type that NumPy and CuPy both compute in."""

    def __init__(self, xp: Any, dtype: Any) -> None:
        self.xp, self.name = xp, np.dtype(dtype).name
        is_half = self.name in ("float16", "bfloat16")
        self.work = np.dtype(np.float32 if is_half else dtype)

    def load(self, x: Array) -> Array:
        """`x` without a change of value, unless the arithmetic itself is coarser."""
        if x.dtype.name == "bfloat16":
            bits = x.view(np.uint16).astype(np.uint32) << np.uint32(16)
            return bits.view(np.float32).astype(self.work)
        return self.rounded(x.astype(self.work))

    def rounded(self, x: Array) -> Array:
        """`x` rounded to the dtype, ties to even."""
        x = x.astype(self.work)
        if self.name == "float16":
            with np.errstate(over="ignore"):
                return x.astype(np.float16).astype(self.work)
        if self.name == "bfloat16":
            bits = self.xp.ascontiguousarray(x).view(np.uint32)
            bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
            return (bits & np.uint32(0xFFFF0000)).view(np.float32).reshape(x.shape)
        return x


def attention(
    q: Array,  # (b, sq, h, d)
    k: Array,  # (b, sk, hk, d)
    v: Array,  # (b, sk, hk, dv)
    *,
    causal: Any = False,
    window: Any = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    mask: Array = None,
    block_mask: Any = None,
    bias: Array = None,
    alibi_slopes: Array = None,
    sinks: Array = None,
    score_mod: Any = None,  # (new score, d new / d score), callables over score, b, h, i, j
    keep: Array = None,  # bool (b, h, sq, sk): what dropout keeps
    dropout_p: float = 0.0,
    dout: Array = None,
    dlse: Array = None,
    dtype: Any = np.float64,
    inputs: Any = None,
    turned: bool = False,
) -> Dense:
    """Outputs and, with `dout`, gradients of one call; `noise` is that of dtype `inputs` or q's.

    Engines round queries that are `turned` by rotary angles to that dtype; here they are not.
    """
    xp = sys.modules[type(q).__module__.partition(".")[0]]
    arithmetic = Arithmetic(xp, dtype)
    load, rounded = arithmetic.load, arithmetic.rounded
    (batch, seqlen_q, heads, head_dim), (seqlen_k, heads_kv) = q.shape, k.shape[1:3]
    shape = (batch, heads, seqlen_q, seqlen_k)
    group = heads // heads_kv
    b, h, i, j = xp.ix_(*map(xp.arange, shape))
    diagonal = i + (0 if causal == "top-left" else seqlen_k - seqlen_q)

    visible = xp.ones(shape, bool)
    if causal:
        visible &= j <= diagonal
    left, right = window or (None, None)
    if left is not None:
        visible &= j >= diagonal - left
    if right is not None:
        visible &= j <= diagonal + right
    if mask is not None:
        visible &= mask
    if block_mask is not None:
        rows, cols = block_mask.block_size
        blocks = xp.repeat(xp.repeat(block_mask.blocks, rows, axis=2), cols, axis=3)
        visible &= blocks[:, :, :seqlen_q, :seqlen_k]
        if block_mask.mask is not None:
            visible &= block_mask.mask
    bias_value = 0 if bias is None else load(bias)
    if bias is not None:  # -inf hides; where it hides, the number itself must not be multiplied
        visible &= bias_value != -np.inf
        bias_value = xp.where(bias_value == -np.inf, 0, bias_value)

    # A key that no query of the head sees does not exist, whatever it holds.
    exists = visible.any(axis=2)[..., None]
    query = load(q).transpose(0, 2, 1, 3)
    key = xp.where(exists, xp.repeat(load(k), group, axis=2).transpose(0, 2, 1, 3), 0)
    value = xp.where(exists, xp.repeat(load(v), group, axis=2).transpose(0, 2, 1, 3), 0)

    scale = 1 / np.sqrt(arithmetic.work.type(head_dim)) if softmax_scale is None else softmax_scale
    score = rounded(scale * rounded(query @ key.swapaxes(2, 3)))
    passed = [score]  # numbers whose rounding the score inherits
    slope = 1.0  # d capped / d product
    if softcap:
        tanh = rounded(xp.tanh(rounded(score / softcap)))
        score, slope = rounded(softcap * tanh), 1 - tanh**2
    if bias is not None:
        score = rounded(score + bias_value)
        passed += [bias_value, score]
    if alibi_slopes is not None:
        added = load(alibi_slopes).reshape(-1, heads, 1, 1) * abs(diagonal - j)
        score = rounded(score - added)
        passed += [added, score]
    factor = 1.0  # d modified / d score
    if score_mod is not None:
        factor = score_mod[1](score, b, h, i, j)
        score = rounded(score_mod[0](score, b, h, i, j))

    # The sink is one more column; without sinks the column is as if hidden.
    sink = xp.full((batch, heads, seqlen_q, 1), -np.inf, arithmetic.work)
    if sinks is not None:
        sink[...] = load(sinks)[:, None, None]
    score = xp.concatenate([xp.where(visible, score, -np.inf), sink], axis=3)
    row_max = score.max(axis=3)
    finite_max = xp.where(row_max == -np.inf, 0, row_max)
    weight = rounded(xp.exp(rounded(score - finite_max[..., None])))
    row_sum = rounded(weight.sum(axis=3))
    prob = rounded(weight / xp.where(row_sum == 0, 1, row_sum)[..., None])
    prob, prob_sink = prob[..., :-1], prob[..., -1]
    kept = 1.0 if keep is None else keep / arithmetic.work.type(1 - dropout_p)
    out = rounded(rounded(prob * kept) @ value)
    with np.errstate(divide="ignore"):
        lse = row_max + xp.log(row_sum)
    inputs = np.dtype(inputs or q.dtype)
    is_judge = np.dtype(dtype).itemsize > inputs.itemsize
    if dout is None:
        noise = deviations(inputs.name, locals()) if is_judge else {}
        return Dense(out.transpose(0, 2, 1, 3), row_max, row_sum, lse, noise=noise)

    dout = load(dout).transpose(0, 2, 1, 3)
    dprob = rounded(dout @ value.swapaxes(2, 3)) * kept
    delta = rounded((prob * dprob).sum(axis=3))
    if dlse is not None:
        delta = delta - load(dlse)
    dscores = rounded(prob * rounded(dprob - delta[..., None]))
    dadded = rounded(dscores * factor)
    dproduct = rounded(dadded * slope)
    dv = rounded(rounded(prob * kept).swapaxes(2, 3) @ dout)
    dq = rounded(scale * (dproduct @ key))
    dk = rounded(scale * (dproduct.swapaxes(2, 3) @ query))

    def heads_last(x: Array, repeats: int) -> Array:
        x = x.reshape(batch, x.shape[1] // repeats, repeats, *x.shape[2:])
        return rounded(x.sum(axis=2)).transpose(0, 2, 1, 3)

    dbias = dsinks = None
    if bias is not None:
        spread = (1,) * (4 - bias.ndim) + bias.shape
        axes = tuple(axis for axis in range(4) if spread[axis] == 1)
        dbias = rounded(dadded.sum(axis=axes, keepdims=True)).reshape(bias.shape)
    if sinks is not None:
        dsinks = rounded((-prob_sink * delta).sum(axis=(0, 2)))
    noise = deviations(inputs.name, locals()) if is_judge else {}
    return Dense(
        heads_last(out, 1), row_max, row_sum, lse, heads_last(dq, 1), heads_last(dk, group),
        heads_last(dv, group), dbias, dsinks, dscores, noise,
    )  # fmt: skip


def attention_varlen(
    q: Array,  # (total_q, h, d)
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    mask: Array = None,
    bias: Array = None,
    alibi_slopes: Array = None,
    score_mod: Any = None,
    keep: Any = None,  # one array an entry
    dout: Array = None,
    dlse: Array = None,
    **options: Any,
) -> Dense:
    """The entries one by one; ``dscores`` is a list. Rows past the last entry see no key."""
    (total_q, heads), dtype = q.shape[:2], options.get("dtype", np.float64)
    work = Arithmetic(np, dtype).work
    row_max, row_sum = np.full((heads, total_q), -np.inf, work), np.zeros((heads, total_q), work)
    out, dq = np.zeros((total_q, heads, v.shape[2]), work), np.zeros(q.shape, work)
    dk, dv = np.zeros(k.shape, work), np.zeros(v.shape, work)
    dscores, noise = [], dict.fromkeys(Dense._fields, 0.0)
    dbias = None if bias is None else np.zeros(bias.shape, work)
    dsinks = None if options.get("sinks") is None else np.zeros(heads, work)
    for entry in range(len(cu_seqlens_q) - 1):
        rows, keys = (slice(cu[entry], cu[entry + 1]) for cu in (cu_seqlens_q, cu_seqlens_k))
        lengths = rows.stop - rows.start, keys.stop - keys.start
        part = attention(
            q[None, rows], k[None, keys], v[None, keys],
            mask=_entry(mask, entry, lengths), bias=_entry(bias, entry, lengths),
            alibi_slopes=alibi_slopes if np.ndim(alibi_slopes) < 2 else alibi_slopes[entry],
            score_mod=score_mod and tuple(_with_batch(f, entry) for f in score_mod),
            keep=None if keep is None else keep[entry],
            dout=None if dout is None else dout[None, rows],
            dlse=None if dlse is None else dlse[None, :, rows], **options,
        )  # fmt: skip
        out[rows], row_max[:, rows], row_sum[:, rows] = (
            part.out[0],
            part.row_max[0],
            part.row_sum[0],
        )
        for name in part.noise.keys() - {"dscores"}:  # of all entries: the largest, or of a sum
            join = np.hypot if name in ("dbias", "dsinks") else max
            noise[name] = float(join(noise[name], part.noise[name]))
        if dout is None:
            continue
        dq[rows], dk[keys], dv[keys] = part.dq[0], part.dk[0], part.dv[0]
        dscores.append(part.dscores)
        if dbias is not None:
            _entry(dbias, entry, lengths)[...] += part.dbias
        if dsinks is not None:
            dsinks += part.dsinks
    if options.get("sinks") is not None:  # behind the last entry a row sees its sink only
        end = cu_seqlens_q[-1]
        row_max[:, end:], row_sum[:, end:] = np.asarray(options["sinks"], work)[:, None], 1
        if dout is not None and dlse is not None:
            dsinks += dlse[:, end:].sum(axis=1)
    with np.errstate(divide="ignore"):
        lse = row_max + np.log(row_sum)
    return Dense(out, row_max, row_sum, lse, dq, dk, dv, dbias, dsinks, dscores, noise)


def _entry(array: Array, entry: int, lengths: tuple[int, int]) -> Array:
    """View of one entry's part of an array that broadcasts to (b, h, max sq, max sk)."""
    if array is None:
        return None
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    rows, cols = (n if size > 1 else 1 for n, size in zip(lengths, array.shape[2:], strict=True))
    first = entry if array.shape[0] > 1 else 0
    return array[first : first + 1, :, :rows, :cols]


def _with_batch(function: Any, entry: int) -> Any:
    return lambda score, b, h, i, j: function(score, entry, h, i, j)


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    """Philox-4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


@functools.lru_cache(maxsize=16)
def dropout_keep(
    seed: int, dropout_p: float, shape: tuple[int, int, int, int], first_batch: int = 0
) -> Array:
    """What dropout keeps, bool `shape` = (b, h, sq, sk), one scalar decision after the other.

    Four elements share a Philox call: bit 3 of i and of j is not part of the counter but chooses
    the word.
    """
    keep, calls = np.empty(shape, bool), {}
    threshold, key = round(dropout_p * 2**32), (seed % 2**32, seed >> 32)
    for b, h, i, j in np.ndindex(shape):
        counter = (j >> 4) << 3 | j & 7, (i >> 4) << 3 | i & 7, h, b + first_batch
        words = calls.get(counter) or calls.setdefault(counter, philox(counter, key))
        keep[b, h, i, j] = words[2 * (i >> 3 & 1) + (j >> 3 & 1)] >= threshold
    return keep
