"""Multi-head attention and a transformer encoder of thinc layers.

They take and return Ragged, Padded, or lists of arrays; inside, sequences are packed.
"""

# No `from __future__ import annotations`: spaCy reads these signatures to check its configs.
from collections.abc import Sequence
from typing import Any

from thinc.api import (
    Dropout,
    Gelu,
    LayerNorm,
    Linear,
    Model,
    chain,
    residual,
    with_array,
    with_ragged,
)
from thinc.types import Padded, Ragged

from cupyflash.thinc.attention import FlashAttention, invalid

__all__ = ["MultiHeadAttention", "TransformerEncoder"]

Window = Sequence[int | None] | None  # a config has lists, not tuples


def MultiHeadAttention(
    width: int,
    num_heads: int,
    *,
    num_heads_kv: int | None = None,
    causal: bool = False,
    window: Window = None,
    rotary: bool = True,
    dropout: float | None = None,
) -> Model:
    """Self-attention of every sequence: projections to heads and back around `FlashAttention`.

    Parameters
    ----------
    width : int
        Of the input and the output; a multiple of `num_heads`.
    num_heads : int

    The others are those of `FlashAttention`.

    Returns
    -------
    Model[SeqT, SeqT]
        Ragged, Padded, or list of arrays ``(length, width)`` to the same.

    Raises
    ------
    ValueError
        Numbers that do not fit.
    thinc.util.DataValidationError
        In use: data of another kind, width or type.
    """
    if num_heads < 1 or width % num_heads:
        raise ValueError(
            f"width must be a multiple of num_heads, got width={width}, num_heads={num_heads}"
        )
    attention = FlashAttention(
        num_heads, width // num_heads, num_heads_kv=num_heads_kv, causal=causal, window=window,
        rotary=rotary, dropout=dropout,
    )  # fmt: skip
    projected = chain(
        with_array(Linear(attention.get_dim("nI"), width)),
        attention,
        with_array(Linear(width, width)),
    )
    return _packed("multi_head_attention", projected, width)


def TransformerEncoder(
    width: int,
    depth: int,
    num_heads: int,
    *,
    num_heads_kv: int | None = None,
    causal: bool = False,
    window: Window = None,
    rotary: bool = True,
    dropout: float = 0.0,
    attention_dropout: float | None = None,
) -> Model:
    """Pre-norm transformer; as spaCy's ``Tok2Vec`` encoder it is its ``encode`` part.

    Parameters
    ----------
    width : int
        Of the input and the output; a multiple of `num_heads`. Feed-forward parts are 4 times as
        wide.
    depth : int
        How many blocks.
    num_heads : int
    dropout : float, default 0
        Of what each block adds; thinc's `set_dropout_rate` (spaCy's ``training.dropout``) changes
        it.
    attention_dropout : float, optional
        `dropout` of `FlashAttention`; None keeps it out, whatever `set_dropout_rate` says.

    The others are those of `FlashAttention`.

    Returns
    -------
    Model[SeqT, SeqT]
        Ragged, Padded, or list of arrays ``(length, width)`` to the same.

    Raises
    ------
    ValueError
        Numbers that do not fit.
    thinc.util.DataValidationError
        In use: data of another kind, width or type.

    Notes
    -----
    Xiong et al. 2020, arXiv 2002.04745, figure 1 (b).
    """
    if depth < 1:
        raise ValueError(f"depth must be >= 1, got {depth}")
    blocks = []
    for _ in range(depth):
        attention = MultiHeadAttention(
            width, num_heads, num_heads_kv=num_heads_kv, causal=causal, window=window,
            rotary=rotary, dropout=attention_dropout,
        )  # fmt: skip
        widen, narrow = Gelu(4 * width, width), Linear(width, 4 * width)
        blocks += [
            residual(chain(with_array(LayerNorm(width)), attention, Dropout(dropout))),
            residual(with_array(chain(LayerNorm(width), widen, narrow, Dropout(dropout)))),
        ]
    normalised = chain(*blocks, with_array(LayerNorm(width)))
    return _packed("transformer_encoder", normalised, width)


def _packed(name: str, layer: Model, width: int) -> Model:
    """`layer` of Ragged for every container, with dimensions, which `with_ragged` has not."""
    dims = {"nI": width, "nO": width}
    return Model(name, _forward, init=_initialize, layers=[with_ragged(layer)], dims=dims)


def _forward(model: Model, sequences: Any, is_train: bool) -> Any:
    _check(model, sequences)
    if not _tokens(sequences):  # thinc's own layers fail or warn without rows; nI is nO
        return sequences, lambda grads: grads
    return model.layers[0](sequences, is_train)


def _check(model: Model, sequences: Any) -> None:
    """Raise DataValidationError unless there are float32 rows of the model's width.

    Rows of a batch without tokens may have any width, as thinc loses it.
    """
    width = model.get_dim("nI")
    wanted = f"Ragged, Padded or a list of float32 arrays (length, {width})"
    packed = isinstance(sequences, (Ragged, Padded))
    if not packed and not isinstance(sequences, (list, tuple)):
        raise invalid(model, sequences, f"it must be {wanted}, got {type(sequences).__name__}")
    for rows in (sequences.data,) if packed else sequences:
        dtype = getattr(rows, "dtype", None)
        shape: tuple[int, ...] = getattr(rows, "shape", ())
        dims = 3 if isinstance(sequences, Padded) else 2
        if len(shape) != dims or dtype != "float32" or (0 not in shape and shape[-1] != width):
            got = f"{dtype} {shape}" if shape else type(rows).__name__
            raise invalid(model, sequences, f"it must be {wanted}, got {got}")


def _tokens(sequences: Any) -> int:
    if isinstance(sequences, Ragged):
        return len(sequences.data)
    if isinstance(sequences, Padded):
        return int(sequences.lengths.sum())
    return sum(map(len, sequences))


def _initialize(model: Model, X: Any = None, Y: Any = None) -> None:
    for sequences in (X, Y):
        if sequences is not None:
            _check(model, sequences)
    # Every dimension is known, and without tokens thinc would take them for 0.
    model.layers[0].initialize(*(x if x is not None and _tokens(x) else None for x in (X, Y)))
