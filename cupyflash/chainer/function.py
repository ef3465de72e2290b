"""`flash_attention` on Chainer variables: one function node forward, one backward."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import numpy as np

import cupyflash
from cupyflash._options import Options
from cupyflash.chainer.errors import invalid_type
from cupyflash.chainer.recompute import gradients_of_gradients
from cupyflash.errors import UnsupportedError
from cupyflash.state import SavedState
from cupyflash.tiling import Tiling

__all__ = ["flash_attention"]

Array = Any
Variable = Any  # chainer.Variable: Chainer has no usable annotations


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    mask: Any = None,
    block_mask: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    score_mod: Any = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    layout: str = "bshd",
    engine: str | None = None,
    tiling: Tiling | None = None,
    deterministic: bool | None = None,
    double_backward: str | None = None,
) -> Variable:
    """Exact softmax attention of Chainer variables, in O(sq + sk) memory.

    The arguments that `cupyflash.flash_attention` has too mean the same here.

    Parameters
    ----------
    q : Variable or array, shape ``(b, sq, h, d)``
    k : Variable or array, shape ``(b, sk, hk, d)``
    v : Variable or array, shape ``(b, sk, hk, dv)``
        float16, float32 or float64, alike; NumPy or CuPy. With ``layout="bhsd"`` heads come first.
    bias : Variable or array broadcastable to ``(b, h, sq, sk)``, optional
        Gets a gradient.
    sinks : Variable or array ``(h,)``, optional
        Gets a gradient; computed with in float32, whatever its dtype.
    dropout_p : float in [0, 1), default 0
        Drops probabilities where ``chainer.config.train`` is set, like `chainer.functions.dropout`.
    seed : int in [0, 2**64), optional
        None draws one from ``numpy.random``, so that ``numpy.random.seed`` repeats a training.
    deterministic : bool, optional
        Bit-equal gradients from run to run; None follows ``chainer.config.cudnn_deterministic``.
    double_backward : "recompute", optional
        Allow gradients of gradients, by a dense computation in O(sq * sk) memory, made only when
        they are asked for. None: they raise `UnsupportedError`.

    Returns
    -------
    chainer.Variable, shape ``(b, sq, h, dv)``

    Raises
    ------
    chainer.utils.type_check.InvalidType
        An array or option does not fit; the message is `cupyflash.flash_attention`'s.
    UnsupportedError, CompileError, NoDeviceError
        As there.

    Notes
    -----
    q, k, v, out and two numbers a row are kept for the backward; nothing under
    ``chainer.no_backprop_mode()``. Parameters of a `ScoreMod` get no gradient.
    """
    if double_backward not in (None, "recompute"):
        raise ValueError(f'double_backward must be None or "recompute", got {double_backward!r}')
    if not chainer.config.train:
        dropout_p = 0.0
    if dropout_p and seed is None:
        seed = int(np.random.randint(2**63, dtype=np.int64))  # noqa: NPY002, Chainer's generator
    mask, alibi_slopes = (chainer.as_array(x) for x in (mask, alibi_slopes))
    differentiable = {"bias": bias, "sinks": None if sinks is None else _in_float32(sinks)}
    extras = {name: x for name, x in differentiable.items() if x is not None}
    options = Options(
        causal, window, softmax_scale, softcap, mask, block_mask, None, alibi_slopes, None,
        score_mod, dropout_p, seed, layout, engine, tiling,
    )  # fmt: skip
    node = FlashAttentionFunction(options, tuple(extras), deterministic, double_backward)
    (out,) = node.apply((q, k, v, *extras.values()))
    return out


class FlashAttentionFunction(chainer.FunctionNode):
    """Inputs q, k, v and those of bias and sinks that `extras` names; output out.

    Attributes
    ----------
    saved : SavedState or None
        The statistics m and l of the forward; None before it and under ``no_backprop_mode``.
    """

    def __init__(
        self,
        options: Options,
        extras: tuple[str, ...] = (),
        deterministic: bool | None = None,
        double_backward: str | None = None,
    ) -> None:
        self.options, self.extras = options, extras
        self.deterministic, self.double_backward = deterministic, double_backward
        self.saved: SavedState | None = None

    def forward(self, inputs: tuple[Array, ...]) -> tuple[Array]:
        q, k, v, *extras = inputs
        given = self.options._asdict() | dict(zip(self.extras, extras, strict=True))
        with invalid_type(self.label):
            if not chainer.config.enable_backprop:
                return (cupyflash.flash_attention(q, k, v, **given),)
            out, self.saved = cupyflash.flash_attention_forward(q, k, v, **given)
        self.retain_inputs(tuple(range(len(inputs))))
        self.retain_outputs((0,))
        return (out,)

    def backward(
        self, indexes: tuple[int, ...], grad_outputs: tuple[Variable]
    ) -> tuple[Variable, ...]:
        gradients = FlashAttentionGrad(self).apply((*self.get_retained_inputs(), *grad_outputs))
        return tuple(gradients[index] for index in indexes)


class FlashAttentionGrad(chainer.FunctionNode):
    """Inputs those of `FlashAttentionFunction` and out's gradient; outputs their gradients."""

    def __init__(self, function: FlashAttentionFunction) -> None:
        self.saved, self.extras = function.saved, function.extras
        self.deterministic, self.double_backward = function.deterministic, function.double_backward

    def forward(self, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        deterministic = self.deterministic
        if deterministic is None:
            deterministic = bool(chainer.config.cudnn_deterministic)
        assert self.saved is not None
        gradients = cupyflash.flash_attention_backward(
            inputs[-1], self.saved, deterministic=deterministic
        )
        if self.double_backward:
            self.retain_inputs(tuple(range(len(inputs))))
        return (*gradients[:3], *(getattr(gradients, f"d{name}") for name in self.extras))

    def backward(
        self, indexes: tuple[int, ...], grad_outputs: tuple[Variable, ...]
    ) -> tuple[Variable, ...]:
        if not self.double_backward:
            raise UnsupportedError(
                "flash_attention was asked for a gradient of its gradient; pass "
                'double_backward="recompute" to get it from a dense computation in O(sq * sk) '
                "memory, or compute the penalty on something else"
            )
        assert self.saved is not None
        second = gradients_of_gradients(
            self.saved, self.extras, self.get_retained_inputs(), grad_outputs
        )
        return tuple(second[index] for index in indexes)


def _in_float32(sinks: Any) -> Variable:
    sinks = chainer.as_variable(sinks)
    is_float = sinks.dtype.kind == "f"  # anything else is refused with the other arguments
    return F.cast(sinks, np.float32) if is_float else sinks
