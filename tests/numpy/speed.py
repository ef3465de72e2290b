"""Time against dense softmax attention in NumPy: ``python -m tests.numpy.speed``.

No test of the default run: on a busy machine a threaded BLAS measures the others' load.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

import cupyflash

# (1, s, heads, 64) and the largest ratio to dense that is acceptable
CASES = [(2048, 8, 1.5), (8192, 2, 1.0)]


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """A careful user's version: batched products, everything else in place."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    scores = np.matmul(q * np.float32(q.shape[-1] ** -0.5), k.swapaxes(2, 3))
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    row_sum = scores.sum(axis=-1, keepdims=True)
    return (np.matmul(scores, v) / row_sum).swapaxes(1, 2)


def best_of(*calls: Callable[[], object], repeats: int = 5) -> list[float]:
    """Return the least seconds of each call; they take turns, as the load of others changes."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return list(map(min, times))


def main() -> None:
    rng = np.random.default_rng(0)
    for seqlen, heads, limit in CASES:
        qkv = [rng.standard_normal((1, seqlen, heads, 64), np.float32) for _ in range(3)]
        naive, tiled = best_of(partial(dense, *qkv), partial(cupyflash.flash_attention, *qkv))
        out, saved = cupyflash.flash_attention_forward(*qkv)
        (backward,) = best_of(partial(cupyflash.flash_attention_backward, out, saved), repeats=2)
        verdict = "ok" if tiled <= limit * naive else f"TOO SLOW, limit {limit}"
        print(
            f"(1, {seqlen}, {heads}, 64) float32: dense {naive:.3f} s, tiled {tiled:.3f} s, ratio "
            f"{tiled / naive:.2f} ({verdict}); backward {backward:.3f} s"
        )


if __name__ == "__main__":
    main()
