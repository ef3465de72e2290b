"""What mma does to scores, over several key tiles."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyflash
from tests.cases import Shape
from tests.harness import check, draw

Options = dict[str, Any]


def _bias(rng: Any, *shape: int) -> Options:
    """A bias that also hides: rows, keys, and elements."""
    bias = rng.normal(size=shape).astype(np.float16)
    bias[..., 40:75] = bias[..., 5, :] = -np.inf
    return {"bias": np.where(rng.random(shape) < 0.02, np.float16(-np.inf), bias)}


def _padding(rng: Any) -> Options:
    return {"mask": np.arange(208) < np.array([208, 70])[:, None, None, None]}


def _floor(rng: Any) -> Options:
    """A bias hides whatever a score_mod makes of -inf: the row's maximum is another key's."""
    mod = cupyflash.ScoreMod(
        forward="fmaxf(score, 1.5f)",
        backward="score > 1.5f ? 1.0f : 0.0f",
        numpy_forward=lambda score, b, h, i, j: np.maximum(score, 1.5),
        numpy_backward=lambda score, b, h, i, j: (score > 1.5) * 1.0,
    )
    bias = rng.uniform(2, 3, size=(1, 2, 100, 150)).astype(np.float32)
    bias[..., ::3] = bias[..., 9, :] = -np.inf
    return {"score_mod": mod, "bias": bias}


def _random_mask(rng: Any, keys: int) -> Options:
    """Tiles of all kinds; rows of 16 n bytes are read as words."""
    mask = rng.random((2, 1, 150, keys)) < 0.5
    mask[..., 96:144] = True
    mask[..., 64:96] = mask[..., 7, :] = False
    return {"mask": mask}


CASES: dict[str, tuple[Shape, str, tuple[str, ...], Callable[[Any], Options]]] = {
    "softcap": (Shape(1, 150, 208, 2, 2, 128, 128), "float16", ("softcap",), lambda rng: {}),
    "softcap causal": (
        Shape(1, 150, 200, 2, 2, 64, 32), "bfloat16", ("softcap", "causal", "sinks", "dlse"),
        lambda rng: {},
    ),
    "softcap wide": (Shape(1, 70, 150, 2, 2, 256, 256), "float16", ("softcap",), lambda rng: {}),
    "softcap alibi": (
        Shape(1, 90, 150, 4, 2, 64, 64), "float16", ("softcap", "alibi", "gqa"), lambda rng: {}
    ),
    "alibi": (Shape(1, 150, 208, 2, 2, 128, 128), "bfloat16", ("alibi",), lambda rng: {}),
    "bias": (
        Shape(2, 140, 170, 2, 2, 128, 128), "float16", (), lambda rng: _bias(rng, 1, 2, 140, 170)
    ),
    "bias of sequences": (
        Shape(2, 140, 170, 4, 2, 64, 64), "bfloat16", ("softcap", "gqa"),
        lambda rng: _bias(rng, 2, 1, 140, 170),
    ),
    "bias of each": (
        Shape(2, 140, 176, 2, 2, 64, 64), "bfloat16", ("softcap",),
        lambda rng: _bias(rng, 2, 2, 140, 176),
    ),
    "dropout": (Shape(1, 150, 208, 2, 2, 128, 128), "float16", ("dropout",), lambda rng: {}),
    "dropout causal": (
        Shape(1, 130, 170, 2, 2, 32, 32), "bfloat16", ("dropout", "causal"), lambda rng: {}
    ),
    "padding": (Shape(2, 150, 208, 2, 2, 128, 128), "float16", (), _padding),
    "mask": (Shape(2, 150, 208, 2, 2, 128, 128), "float16", (), lambda rng: _random_mask(rng, 208)),
    "mask wide": (
        Shape(2, 150, 208, 2, 2, 160, 160), "bfloat16", (), lambda rng: _random_mask(rng, 208)
    ),
    "mask of odd rows": (
        Shape(2, 150, 201, 2, 2, 64, 64), "float16", ("dropout",),
        lambda rng: _random_mask(rng, 201),
    ),
    "block mask": (Shape(1, 150, 208, 2, 2, 64, 64), "float16", ("block_mask",), lambda rng: {}),
    "score_mod": (Shape(1, 100, 150, 2, 2, 64, 64), "bfloat16", ("score_mod",), lambda rng: {}),
    "score_mod bias": (Shape(1, 100, 150, 2, 2, 64, 64), "float16", (), _floor),
}  # fmt: skip


# CI has seconds for these; CUPYFLASH_EMULATE=all runs all of them.
CHOSEN = (
    "softcap causal",
    "alibi",
    "bias",
    "bias of sequences",
    "dropout causal",
    "padding",
    "mask",
    "score_mod bias",
)
everything = os.environ.get("CUPYFLASH_EMULATE") == "all"


@pytest.mark.parametrize("case", CASES if everything else CHOSEN)
def test_feature(rng: Any, case: str) -> None:
    shape, dtype, features, options = CASES[case]
    check("mma", **draw(rng, shape, dtype, features), **options(rng))
