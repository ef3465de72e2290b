"""`FlashAttention`: attention's options, and sinks where they are learnt, as a link."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import chainer
import numpy as np

from cupyflash._options import integer
from cupyflash.chainer.function import flash_attention

__all__ = ["FlashAttention"]

Variable = Any


class FlashAttention(chainer.Link):
    """Attention over queries, keys and values that are already split into heads.

    Parameters
    ----------
    causal, window, softmax_scale, softcap, layout, engine, tiling, deterministic, double_backward
        As in `cupyflash.chainer.flash_attention`.
    dropout : float in [0, 1), default 0
        Its `dropout_p`; takes part where ``chainer.config.train`` is set.
    sinks : int, optional
        Number of query heads; gives each a learnt sink, the float32 parameter ``sinks``.
    initial_sinks : initializer, optional
        Of that parameter; None = 0.

    Raises
    ------
    TypeError, ValueError
        `sinks` is no positive integer, or `initial_sinks` is given without it. The other options
        are checked where they are used.
    """

    def __init__(
        self,
        *,
        causal: bool | str = False,
        window: tuple[int | None, int | None] | None = None,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
        sinks: int | None = None,
        initial_sinks: Any = None,
        layout: str = "bshd",
        engine: str | None = None,
        tiling: Any = None,
        deterministic: bool | None = None,
        double_backward: str | None = None,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.options = {
            "causal": causal, "window": window, "softmax_scale": softmax_scale,
            "softcap": softcap, "layout": layout, "engine": engine, "tiling": tiling,
            "deterministic": deterministic, "double_backward": double_backward,
        }  # fmt: skip
        self.sinks = None
        if sinks is None:
            if initial_sinks is not None:
                raise ValueError(
                    "initial_sinks needs sinks, the number of query heads, to be given"
                )
        else:
            if integer(sinks, "sinks") < 1:
                raise ValueError(f"sinks must be the number of query heads, got {sinks!r}")
            with self.init_scope():
                initial = np.empty(sinks, np.float32)  # whatever chainer.config.dtype is
                initializer = 0 if initial_sinks is None else initial_sinks
                chainer.initializers._get_initializer(initializer)(initial)
                self.sinks = chainer.Parameter(initial)

    def forward(self, q: Any, k: Any, v: Any, **arrays: Any) -> Variable:
        """Attend.

        Parameters
        ----------
        q, k, v : Variable or array
        **arrays
            What changes from call to call: mask, block_mask, bias, alibi_slopes, score_mod, seed.

        Returns
        -------
        chainer.Variable
        """
        return flash_attention(
            q, k, v, sinks=self.sinks, dropout_p=self.dropout, **self.options, **arrays
        )

    @property
    def printable_specs(self) -> Iterator[tuple[str, Any]]:
        """What ``repr`` shows: the options that are set."""
        yield from ((name, value) for name, value in self.options.items() if value)
        yield from (("dropout", self.dropout),) if self.dropout else ()
