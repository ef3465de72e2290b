"""The attention itself as a thinc layer: no weights, sequences packed without padding."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from thinc.model import Model
from thinc.types import Ragged
from thinc.util import DataValidationError

import cupyflash
from cupyflash.thinc.rotary import rotary_table, rotate

__all__ = ["FlashAttention", "invalid"]

Array = Any


def FlashAttention(
    num_heads: int,
    head_dim: int,
    *,
    num_heads_kv: int | None = None,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    rotary: bool = True,
    dropout: float | None = None,
) -> Model:
    """Attention between the tokens of each sequence of a Ragged batch.

    Parameters
    ----------
    num_heads, head_dim : int
        h and d.
    num_heads_kv : int, optional
        hk: each key-value head serves ``h / hk`` query heads. None = h.
    causal : bool, default False
        Tokens see those before them and themselves.
    window : (left, right), optional
        How many tokens before and after a token it sees; None = all.
    rotary : bool, default True
        Turn queries and keys by their positions; without it the layer does not see the order.
    dropout : float, optional
        Attribute ``dropout_rate``, which thinc's `set_dropout_rate` changes and which acts in
        training only. None = the layer has no such attribute.

    Returns
    -------
    Model[Ragged, Ragged]
        From ``(total, (h + 2 hk) * d)``, each row queries, keys, values, to ``(total, h * d)``.

    Raises
    ------
    ValueError
        Head numbers that do not fit; an odd `head_dim` with `rotary`.
    thinc.util.DataValidationError
        In use: data of another width or type.

    Notes
    -----
    For the backward the layer keeps its (rotated) input, its output and two numbers a row and head.
    """
    heads_kv = num_heads if num_heads_kv is None else num_heads_kv
    if min(num_heads, heads_kv, head_dim) < 1 or num_heads % heads_kv:
        raise ValueError(
            "num_heads must be a multiple of num_heads_kv, all positive, got "
            f"num_heads={num_heads}, num_heads_kv={heads_kv}, head_dim={head_dim}"
        )
    if rotary and head_dim % 2:
        raise ValueError(f"rotary turns pairs: head_dim must be even, got {head_dim}")
    attrs: dict[str, Any] = {
        "num_heads": num_heads,
        "num_heads_kv": heads_kv,
        "head_dim": head_dim,
        "causal": causal,
        "window": window,
        "rotary": rotary,
    }
    if dropout is not None:
        attrs["dropout_rate"] = dropout
    width_in, width_out = (num_heads + 2 * heads_kv) * head_dim, num_heads * head_dim
    return Model("flash_attention", _forward, dims={"nI": width_in, "nO": width_out}, attrs=attrs)


def _forward(model: Model, ragged: Ragged, is_train: bool) -> tuple[Ragged, Callable[..., Ragged]]:
    if isinstance(ragged, Ragged) and not len(ragged.data):
        return _without_tokens(model, ragged)
    xp, heads, heads_kv = model.ops.xp, model.attrs["num_heads"], model.attrs["num_heads_kv"]
    qkv = _checked(model, ragged, "nI").reshape(len(ragged.data), -1, model.attrs["head_dim"])
    cu_seqlens = _cu_seqlens(ragged.lengths)
    turn, turn_back = _turns(model, len(ragged.data))
    query, key, value = xp.split(qkv, [heads, heads + heads_kv], axis=1)
    try:
        out, saved = cupyflash.flash_attention_varlen_forward(
            turn(query), turn(key), value, cu_seqlens, cu_seqlens,
            causal=model.attrs["causal"], window=model.attrs["window"], **_dropout(model, is_train),
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise invalid(model, ragged, str(error)) from error

    def backprop(grad: Ragged) -> Ragged:
        dout = _checked(model, grad, "nO").reshape(-1, *out.shape[1:])
        try:
            grads = cupyflash.flash_attention_backward(dout, saved)
        except (TypeError, ValueError) as error:
            raise invalid(model, grad, str(error)) from error
        parts = turn_back(grads.dq), turn_back(grads.dk), grads.dv
        data = xp.concatenate(parts, axis=1).reshape(ragged.data.shape)
        return Ragged(data, ragged.lengths)

    return Ragged(out.reshape(len(out), -1), ragged.lengths), backprop


def _without_tokens(model: Model, ragged: Ragged) -> tuple[Ragged, Callable[..., Ragged]]:
    """No rows, as wide as they would be; the input may have any width, as thinc loses it."""
    xp, dtype = model.ops.xp, ragged.data.dtype

    def rows(dim: str) -> Ragged:
        return Ragged(xp.zeros((0, model.get_dim(dim)), dtype), ragged.lengths)

    return rows("nO"), lambda grad: rows("nI")


def _cu_seqlens(lengths: Array) -> Array:
    """Where the sequences begin and the last one ends, on the host or device of the lengths."""
    cu_seqlens = lengths[:1].astype("int32").repeat(len(lengths) + 1)
    cu_seqlens[0] = 0
    cu_seqlens[1:] = lengths.cumsum()
    return cu_seqlens


def _turns(model: Model, total: int) -> tuple[Callable[..., Array], ...]:
    """Functions that turn heads by their positions, and back."""
    if not model.attrs["rotary"]:
        return (lambda heads: heads), (lambda heads: heads)
    xp = model.ops.xp
    cos, sin = rotary_table(xp, total, model.attrs["head_dim"])
    return (
        lambda heads: rotate(xp, heads, cos, sin),
        lambda heads: rotate(xp, heads, cos, -sin),
    )


def _dropout(model: Model, is_train: bool) -> dict[str, Any]:
    rate = model.attrs.get("dropout_rate", 0.0) if is_train else 0.0
    # From the generator that thinc's fix_random_seed seeds, so that runs can be repeated.
    return {"dropout_p": rate, "seed": random.getrandbits(64)} if rate else {}


def _checked(model: Model, ragged: Any, dim: str) -> Array:
    expected = model.get_dim(dim)
    if not isinstance(ragged, Ragged):
        raise invalid(model, ragged, f"it must be a Ragged of rows {expected} wide ({dim})")
    if ragged.data.shape[1] != expected:
        raise invalid(
            model, ragged, f"rows must be {expected} wide ({dim}), got {ragged.data.shape[1]}"
        )
    return ragged.data


def invalid(model: Model, data: Any, message: str) -> DataValidationError:
    """Return thinc's error about what a layer was given."""
    loc = [type(data).__name__]
    return DataValidationError(model.name, data, None, [{"loc": loc, "msg": message}])
