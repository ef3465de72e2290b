"""`MultiHeadAttention`: projections around `FlashAttention`, as a chain."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L

from cupyflash._arrays import as_boolean, describe, place_of, require_place
from cupyflash._options import integer
from cupyflash.chainer.errors import invalid_type
from cupyflash.chainer.link import FlashAttention

__all__ = ["MultiHeadAttention"]

Variable = Any

_LAYOUTS = {"btc": (0, 1, 2), "bct": (0, 2, 1)}


class MultiHeadAttention(chainer.Chain):
    """Self- or cross-attention with its four projections.

    Parameters
    ----------
    embed_dim : int
        Channels C of the queries and of the output.
    num_heads : int
        Query heads; must divide `embed_dim`.
    num_heads_kv : int, optional
        Key-value heads, must divide `num_heads` (grouped-query attention); None = `num_heads`.
    key_dim, value_dim : int, optional
        Channels of the keys and values given to cross-attention; None = `embed_dim`.
    layout : "btc" or "bct", default "btc"
        Axes of inputs and output: ``(B, T, C)``, or Chainer's own ``(B, C, T)``.
    sinks : bool, default False
        Learn a sink for each head.
    nobias : bool, default False
        Projections without bias.
    initialW, initial_bias : initializer, optional
        Of the projections, as in `chainer.links.Linear`.
    **options
        Options of `FlashAttention`: causal, window, softmax_scale, softcap, dropout, engine,
        tiling, deterministic, double_backward, initial_sinks.

    Raises
    ------
    ValueError
        Heads do not divide what they must, or `layout` is unknown.

    Notes
    -----
    Parameters follow ``chainer.config.dtype``; with ``mixed16`` they are float16, as those of
    Chainer's own links (call the optimizer's ``use_fp32_update``), while sinks stay float32 and
    attention sums in float32. Attention Is All You Need (Vaswani et al. 2017, arXiv 1706.03762),
    section 3.2.2.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_heads_kv: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        layout: str = "btc",
        sinks: bool = False,
        nobias: bool = False,
        initialW: Any = None,
        initial_bias: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        for name, whole, part in (
            ("embed_dim", embed_dim, num_heads),
            ("num_heads", num_heads, num_heads_kv),
        ):
            if integer(part, "num_heads") < 1 or integer(whole, name) < 1 or whole % part:
                raise ValueError(
                    f"{name} must be a multiple of the heads, both positive, got {whole} and {part}"
                )
        if layout not in _LAYOUTS:
            raise ValueError(f"layout must be one of {tuple(_LAYOUTS)}, got {layout!r}")
        self.num_heads, self.num_heads_kv = num_heads, num_heads_kv
        self.head_dim = embed_dim // num_heads
        self.axes = _LAYOUTS[layout]
        kv_size = num_heads_kv * self.head_dim

        def projection(in_size: int | None, out_size: int) -> Any:
            return L.Linear(in_size or embed_dim, out_size, nobias, initialW, initial_bias)

        with self.init_scope():
            self.query = projection(None, embed_dim)
            self.key = projection(key_dim, kv_size)
            self.value = projection(value_dim, kv_size)
            self.attention = FlashAttention(sinks=num_heads if sinks else None, **options)
            self.out = projection(None, embed_dim)

    def forward(
        self,
        query: Any,
        key: Any = None,
        value: Any = None,
        *,
        padding_mask: Any = None,
        mask: Any = None,
        **arrays: Any,
    ) -> Variable:
        """Attend from `query` to `key`.

        Parameters
        ----------
        query : Variable or array, ``(B, T, C)`` or ``(B, C, T)``
        key, value : Variable or array, optional
            None: `query` (self-attention), and `key`.
        padding_mask : bool array, shape ``(B, T of the keys)``, optional
            True = a real token, False = padding, which nobody sees.
        mask : bool array broadcastable to ``(B, heads, T, T of the keys)``, optional
            True = takes part.
        **arrays
            block_mask, bias, alibi_slopes, score_mod and seed of `flash_attention`.

        Returns
        -------
        chainer.Variable of `query`'s shape; rows that see no key hold the output's bias.

        Raises
        ------
        chainer.utils.type_check.InvalidType
            An array does not fit.
        """
        key = query if key is None else key
        value = key if value is None else value
        with invalid_type(type(self).__name__):
            for name, x in (("query", query), ("key", key), ("value", value)):
                _require_three_axes(x, name)
            if padding_mask is not None:
                mask = _with_padding(padding_mask, mask)
        out = self.attention(
            self._heads(self.query, query, self.num_heads),
            self._heads(self.key, key, self.num_heads_kv),
            self._heads(self.value, value, self.num_heads_kv),
            mask=mask,
            **arrays,
        )
        *lengths, heads, head_dim = out.shape
        out = F.reshape(out, (*lengths, heads * head_dim))
        return F.transpose(_projected(self.out, out), self.axes)

    def _heads(self, projection: Any, x: Any, num_heads: int) -> Variable:
        x = _projected(projection, F.transpose(x, self.axes))
        return F.reshape(x, (*x.shape[:2], num_heads, self.head_dim))


def _projected(projection: Any, x: Variable) -> Variable:
    """Project ``(B, T, C)``; n_batch_axes would not know how many rows an empty one has."""
    batch, length, channels = x.shape
    rows = projection(F.reshape(x, (batch * length, channels)))
    return F.reshape(rows, (batch, length, rows.shape[1]))


def _require_three_axes(x: Any, name: str) -> None:
    if getattr(x, "ndim", 3) != 3:  # what is no array is refused by Chainer's functions
        raise ValueError(f"{name} must have 3 axes, (B, T, C) or (B, C, T), got {describe(x)}")


def _with_padding(padding_mask: Any, mask: Any) -> Any:
    """Return the mask that hides the padding, and what `mask` hides if it is given."""
    padding_mask = as_boolean(chainer.as_array(padding_mask), "padding_mask")
    if padding_mask.ndim != 2:
        raise ValueError(
            f"padding_mask must have shape (B, T of the keys), got {describe(padding_mask)}"
        )
    real = padding_mask[:, None, None, :]
    if mask is None:
        return real
    mask = as_boolean(chainer.as_array(mask), "mask")
    require_place(mask, "mask", place_of(padding_mask))
    try:
        return real & mask
    except ValueError:
        raise ValueError(
            f"mask, {describe(mask)}, does not go with padding_mask, {describe(padding_mask)}; "
            "it must broadcast to (B, heads, T, T of the keys)"
        ) from None
