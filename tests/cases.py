"""What is tested: engines and what each serves, dtypes, features, and shapes."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations, product
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import cupyflash

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)  # inputs only, so no row of the tables of dtypes
FLOAT8_ENGINES = ("numpy", "simt")
FLOAT8_ROUNDING_ENGINES = (*FLOAT8_ENGINES, "wgmma")  # probabilities too


class Shape(NamedTuple):
    """Of one call; varlen: `seqlen_q`, `seqlen_k` are the longest entries."""

    batch: int = 2
    seqlen_q: int = 37
    seqlen_k: int = 53
    heads: int = 4
    heads_kv: int = 4
    head_dim: int = 24
    head_dim_v: int = 24


def _window(rng: Any, shape: Shape) -> tuple[int, int]:
    return int(rng.integers(shape.seqlen_k + 1)), int(rng.integers(shape.seqlen_k + 1))


def _scores(rng: Any, shape: Shape) -> tuple[int, ...]:
    """Something that broadcasts to (b, h, sq, sk)."""
    full = (shape.batch, shape.heads, shape.seqlen_q, shape.seqlen_k)
    full = tuple(n if rng.random() < 0.6 else 1 for n in full)
    return full if full[0] > 1 or rng.random() < 0.5 else full[1:]


def _block_mask(rng: Any, shape: Shape) -> cupyflash.BlockMask:
    size = int(rng.integers(1, 30)), int(rng.integers(1, 30))
    blocks = (
        rng.choice([1, shape.batch]), rng.choice([1, shape.heads]),
        -(-shape.seqlen_q // size[0]), -(-shape.seqlen_k // size[1]),
    )  # fmt: skip
    inner = rng.random((shape.seqlen_q, shape.seqlen_k)) < 0.9 if rng.random() < 0.5 else None
    return cupyflash.BlockMask(rng.random(blocks) < 0.6, block_size=size, mask=inner)


def new_score(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score / (1 + score * score) + score * (h + b + 1) * 0.25 + (j - i) * 0.015625


def score_factor(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return (1 - score * score) / (1 + score * score) ** 2 + (h + b + 1) * 0.25


SCORE_MOD = cupyflash.ScoreMod(
    forward="score / (1 + score * score) + score * (h + b + 1) * 0.25f + (j - i) * 0.015625f",
    backward="(1 - score * score) / ((1 + score * score) * (1 + score * score))"
    " + (h + b + 1) * 0.25f",
    numpy_forward=new_score,
    numpy_backward=score_factor,
)

# Each feature draws its keyword arguments.
Draw = Callable[[Any, Shape], dict[str, Any]]
FEATURES: dict[str, Draw] = {
    "causal": lambda rng, shape: {"causal": (True, "bottom-right")[int(rng.integers(2))]},
    "top_left": lambda rng, shape: {"causal": "top-left"},
    "window": lambda rng, shape: {"window": _window(rng, shape)},
    "softcap": lambda rng, shape: {"softcap": rng.uniform(0.5, 3)},
    "scale": lambda rng, shape: {"softmax_scale": rng.uniform(-0.5, 0.5)},
    "mask": lambda rng, shape: {"mask": rng.random(_scores(rng, shape)) < 0.7},
    "block_mask": lambda rng, shape: {"block_mask": _block_mask(rng, shape)},
    "bias": lambda rng, shape: {"bias": rng.normal(size=_scores(rng, shape)).astype(np.float32)},
    "alibi": lambda rng, shape: {
        "alibi_slopes": rng.uniform(
            0, 0.5, (shape.batch, shape.heads)[int(rng.integers(2)) :]
        ).astype(np.float32)
    },
    "sinks": lambda rng, shape: {"sinks": rng.normal(size=shape.heads).astype(np.float32)},
    "score_mod": lambda rng, shape: {"score_mod": SCORE_MOD},
    "dropout": lambda rng, shape: {
        "dropout_p": rng.uniform(0.1, 0.7),
        "seed": int(rng.integers(2**64, dtype=np.uint64)),
    },
    # These change the shapes rather than the options: harness.draw knows them.
    "gqa": lambda rng, shape: {},
    "dlse": lambda rng, shape: {},
    "varlen": lambda rng, shape: {},
}
EXCLUSIVE = [{"causal", "top_left"}, {"varlen", "block_mask"}]
PAIRS = [pair for pair in combinations(FEATURES, 2) if set(pair) not in EXCLUSIVE]

# What each engine serves. A call outside its row must raise UnsupportedError, and only such calls
# are skipped: support cannot vanish unseen. dtypes, strides (but for wgmma's copy engine, see
# harness.named), empty shapes, 3-D input, both layouts, any head_dim and softmax_scale are never
# optional.
SUPPORTED: dict[str, frozenset[str]] = {
    "numpy": frozenset(FEATURES),
    "simt": frozenset(FEATURES),
    "mma": frozenset(FEATURES),
    "wgmma": frozenset(
        {"causal", "top_left", "window", "softcap", "scale", "sinks", "gqa", "dlse"}
        | {"alibi", "bias", "varlen"}
    ),
}
_TENSOR_CORES = ("float16", "bfloat16")
ENGINE_DTYPES = {
    "numpy": tuple(DTYPES),
    "simt": tuple(DTYPES),
    "mma": _TENSOR_CORES,
    "wgmma": _TENSOR_CORES,
}


def usual_dtype(engine: str) -> str:
    """float32, or for engines without it bfloat16, which has its range."""
    return "float32" if "float32" in ENGINE_DTYPES[engine] else "bfloat16"


GPU_ENGINES = [engine for engine in SUPPORTED if engine != "numpy"]

# FlashAttention-2's own matrix of its tests (tests/test_flash_attn.py): ragged on purpose.
HEAD_DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
_LENGTHS = (
    (1, 239), (3, 799), (108, 256), (113, 203), (127, 512), (128, 217), (256, 512), (1023, 1024),
    (2048, 2048),
)  # fmt: skip
LENGTHS = tuple(dict.fromkeys(pair for sq, sk in _LENGTHS for pair in ((sq, sk), (sk, sq))))
HEADS = {"mha": (6, 6), "gqa": (6, 2), "mqa": (6, 1)}
CAUSAL = (False, "bottom-right", "top-left")


class MatrixCase(NamedTuple):
    """One entry of the matrix."""

    seqlens: tuple[int, int]
    head_dim: int
    heads: str
    causal: Any
    dtype: str

    def __str__(self) -> str:
        sq, sk = self.seqlens
        return f"{sq}x{sk}-d{self.head_dim}-{self.heads}-{self.causal}-{self.dtype}"


def matrix(full: bool) -> list[MatrixCase]:
    """Every length with every head_dim, twice; or (not `full`) every length once.

    Heads, causal form and dtype are dealt like cards: all 27 combinations before any returns.
    """
    dealer, deck, cases = random.Random(2307), [], []
    for row, seqlens in enumerate(LENGTHS):
        head_dims = HEAD_DIMS * 2 if full else [HEAD_DIMS[5 * row % len(HEAD_DIMS)]]
        for head_dim in head_dims:
            if not deck:
                deck = list(product(HEADS, CAUSAL, list(DTYPES)[:3]))
                dealer.shuffle(deck)
            cases.append(MatrixCase(seqlens, head_dim, *deck.pop()))
    return list(dict.fromkeys(cases))
