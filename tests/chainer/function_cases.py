"""What Chainer's FunctionTestCase needs to know about flash_attention; see test_function.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyflash.chainer import flash_attention
from tests import cases, reference
from tests.memory import to_engine

SHAPE = cases.Shape(seqlen_q=7, seqlen_k=9, head_dim=5, head_dim_v=4)
FEATURES = ("plain", *(name for name in cases.FEATURES if name not in ("dlse", "varlen")))
TOLERANCE = {  # of out, gradients and gradients of gradients
    np.float16: {"atol": 5e-3, "rtol": 5e-2},
    np.float32: {"atol": 2e-4, "rtol": 2e-4},
    np.float64: {"atol": 1e-6, "rtol": 1e-6},
}


class FlashAttentionCase:
    """One feature, dtype and layout; `FunctionTestCase` tests it, up to double backward."""

    feature, dtype, layout = "plain", np.float64, "bshd"

    @pytest.fixture(autouse=True)
    def _draw(self, rng: Any) -> None:
        self.rng = rng
        draw = cases.FEATURES.get(self.feature)
        self.options = draw(rng, SHAPE) if draw else {}
        extras = {name: self.options.pop(name, None) for name in ("bias", "sinks")}
        self.extras = {name: x for name, x in extras.items() if x is not None}
        # The second derivatives of a user's score are not known.
        self.skip_double_backward_test = self.feature == "score_mod"

    def before_test(self, test_name: str) -> None:
        tolerance = TOLERANCE[self.dtype]
        self.check_forward_options = tolerance
        # The numerical gradient is of float64 throughout, but sinks are float32 inside.
        options = tolerance
        if self.feature == "sinks":
            options = {"atol": 2e-3, "rtol": 2e-3}
        elif self.dtype == np.float64:  # a step that leaves less out than Chainer's own of 1e-3
            options = tolerance | {"eps": 1e-4}
        self.check_backward_options = self.check_double_backward_options = options

    def generate_inputs(self) -> tuple[Any, ...]:
        b, sq, sk, h, hk, d, dv = SHAPE
        hk = h // 2 if self.feature == "gqa" else hk
        shapes = [(b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv)]
        qkv = (self.rng.normal(size=shape).astype(self.dtype) for shape in shapes)
        return (*(self._users(x) for x in qkv), *self.extras.values())

    def forward(self, inputs: tuple[Any, ...], device: Any) -> tuple[Any]:
        engine = "numpy" if device.xp is np else "simt"
        options = {name: to_engine(engine, x) for name, x in self.options.items()}
        options |= dict(zip(self.extras, inputs[3:], strict=True))
        return (
            flash_attention(
                *inputs[:3], layout=self.layout, double_backward="recompute", **options
            ),
        )

    def forward_expected(self, inputs: tuple[Any, ...]) -> tuple[Any]:
        q, k, v = (self._users(x) for x in inputs[:3])
        options = self.options | dict(zip(self.extras, inputs[3:], strict=True))
        if seed := options.pop("seed", None):
            shape = SHAPE.batch, SHAPE.heads, SHAPE.seqlen_q, SHAPE.seqlen_k
            options["keep"] = reference.dropout_keep(seed, options["dropout_p"], shape)
        if score_mod := options.pop("score_mod", None):
            options["score_mod"] = score_mod.numpy_forward, score_mod.numpy_backward
        out = reference.attention(q, k, v, **options).out
        return (self._users(out).astype(self.dtype),)

    def _users(self, x: Any) -> Any:
        """Swap tokens and heads for "bhsd", and back."""
        return np.ascontiguousarray(x.swapaxes(1, 2)) if self.layout == "bhsd" else x
