"""What Chainer's LinkTestCase needs to know about MultiHeadAttention; see test_link.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chainer.initializers import Constant
from chainer.testing import InitializerArgument

from cupyflash.chainer import MultiHeadAttention
from tests import reference

EMBED, HEADS, KEY_DIM, VALUE_DIM, TOKENS, KEYS = 8, 2, 6, 5, 4, 7


class MultiHeadCase:
    """Self- or cross-attention in one layout."""

    cross = padded = causal = sinks = False
    layout, num_heads_kv, dtype = "btc", HEADS, np.float64

    @property
    def param_names(self) -> list[str]:
        names = [f"{part}_{w}" for part in ("query", "key", "value", "out") for w in "Wb"]
        return [*names, "attention_sinks"] if self.sinks else names

    @pytest.fixture(autouse=True)
    def _draw(self, rng: Any) -> None:
        self.rng = rng
        self.keys = KEYS if self.cross else TOKENS
        self.real = np.arange(self.keys) < np.array([[2], [self.keys]])

    def before_test(self, test_name: str) -> None:
        exact = self.dtype == np.float64 and not self.sinks
        tolerance = {"atol": 1e-6, "rtol": 1e-6} if exact else {"atol": 1e-3, "rtol": 1e-3}
        self.check_forward_options = tolerance
        # The scores are large, and so is what Chainer's own step of 1e-3 leaves out.
        self.check_backward_options = tolerance | ({"eps": 1e-4} if exact else {})

    def generate_params(self) -> tuple[Any, ...]:
        kv = self.num_heads_kv * EMBED // HEADS
        widths = [(EMBED, EMBED), (kv, EMBED), (kv, EMBED), (EMBED, EMBED)]
        if self.cross:
            widths[1:3] = (kv, KEY_DIM), (kv, VALUE_DIM)
        shapes = [shape for out, width in widths for shape in ((out, width), (out,))]
        params = [self.rng.normal(size=shape).astype(self.dtype) for shape in shapes]
        if self.sinks:
            params.append(self.rng.normal(size=HEADS).astype(np.float32))
        return tuple(params)

    def create_link(self, initializers: tuple[Any, ...]) -> Any:
        link = MultiHeadAttention(
            EMBED, HEADS, num_heads_kv=self.num_heads_kv, causal=self.causal, sinks=self.sinks,
            layout=self.layout, double_backward="recompute",
            **{"key_dim": KEY_DIM, "value_dim": VALUE_DIM} if self.cross else {},
        )  # fmt: skip
        # Chainer looks for the parameters on the link itself.
        vars(link).update((n[1:].replace("/", "_"), param) for n, param in link.namedparams())
        for param, value in zip(self._params(link), initializers, strict=True):
            param.array = np.array(value)
        return link

    def generate_inputs(self) -> tuple[Any, ...]:
        shapes = [(2, TOKENS, EMBED)]
        if self.cross:
            shapes += [(2, self.keys, KEY_DIM), (2, self.keys, VALUE_DIM)]
        return tuple(self._users(self.rng.normal(size=s).astype(self.dtype)) for s in shapes)

    def forward(self, link: Any, inputs: tuple[Any, ...], device: Any) -> tuple[Any]:
        return (link(*inputs, padding_mask=device.send(self.real) if self.padded else None),)

    def forward_expected(self, link: Any, inputs: tuple[Any, ...]) -> tuple[Any]:
        wq, bq, wk, bk, wv, bv, wo, bo, *sinks = (p.array for p in self._params(link))
        query, key, value = (self._users(x) for x in (inputs if self.cross else inputs * 3))
        out = reference.attention(
            (query @ wq.T + bq).reshape(2, TOKENS, HEADS, -1),
            (key @ wk.T + bk).reshape(2, self.keys, self.num_heads_kv, -1),
            (value @ wv.T + bv).reshape(2, self.keys, self.num_heads_kv, -1),
            causal=self.causal,
            mask=self.real[:, None, None] if self.padded else None,
            sinks=sinks[0] if sinks else None,
        ).out
        out = out.reshape(2, TOKENS, EMBED) @ wo.T + bo
        return (self._users(out).astype(self.dtype),)

    def _params(self, link: Any) -> list[Any]:
        return [getattr(link, name) for name in self.param_names]

    def _users(self, x: Any) -> Any:
        return np.ascontiguousarray(x.swapaxes(1, 2)) if self.layout == "bct" else x


class MultiHeadInitializersCase:
    """initialW and initial_bias reach the projections, initial_sinks the sinks."""

    param_names = ("W", "b", "sinks")

    def generate_params(self) -> tuple[Any, ...]:
        return Constant(0.5), Constant(1), Constant(2)

    def get_initializers(self) -> tuple[list[Any], ...]:
        return (
            [Constant(3), 2, np.random.default_rng(0).normal(size=(EMBED, EMBED))],
            [Constant(3), 2, InitializerArgument(None, 0)],
            [Constant(3), 2, np.float32([0, 1])],
        )

    def create_link(self, initializers: tuple[Any, ...]) -> Any:
        initial_w, initial_bias, initial_sinks = initializers
        link = MultiHeadAttention(
            EMBED, HEADS, sinks=True,
            initialW=initial_w, initial_bias=initial_bias, initial_sinks=initial_sinks,
        )  # fmt: skip
        vars(link).update(W=link.value.W, b=link.value.b, sinks=link.attention.sinks)
        return link

    def generate_inputs(self) -> tuple[Any]:
        return (np.zeros((1, TOKENS, EMBED), np.float32),)

    def forward(self, link: Any, inputs: tuple[Any, ...], device: Any) -> tuple[Any]:
        return (link(*inputs),)
