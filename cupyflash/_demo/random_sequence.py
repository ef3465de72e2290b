"""The demo on one long random sequence, for machines without the pretrained weights."""

from __future__ import annotations

from typing import Any

import numpy as np

import cupyflash
from cupyflash._demo.dense import dense_backward, dense_forward
from cupyflash._demo.device import Measurement, measure

__all__ = ["show_random_sequence"]

Array = Any


def show_random_sequence(xp: Any) -> None:
    """Forward and backward on ``(s, h, d)`` noise, against dense attention."""
    seqlen, num_heads, head_dim = (2048, 4, 64) if xp is np else (4096, 8, 64)
    rng = np.random.default_rng(0)
    query, key, value, grad_out = (
        xp.asarray(rng.standard_normal((seqlen, num_heads, head_dim), np.float32)) for _ in range(4)
    )

    def flash() -> tuple[Array, ...]:
        out, saved = cupyflash.flash_attention_forward(query, key, value, causal=True)
        grads = cupyflash.flash_attention_backward(grad_out, saved)
        return out, grads.dq, grads.dk, grads.dv

    def dense() -> tuple[Array, ...]:
        out, weights = dense_forward(query, key, value, causal=True)
        return out, *dense_backward(grad_out, query, key, value, weights)

    print(f"input     {seqlen} tokens, {num_heads} heads of {head_dim}, float32, causal, random")
    if xp is not np:  # kernels are compiled and libraries loaded when first needed
        flash(), dense()
    flash_run, dense_run = measure(xp, flash), measure(xp, dense)
    print("\nforward and backward        time     peak memory")
    print_row("cupyflash", flash_run)
    print_row("dense", dense_run)
    saved_memory = dense_run.peak_bytes / max(flash_run.peak_bytes, 1)
    print(f"\nmemory    {saved_memory:.1f} times less than dense attention")
    print("check     largest difference from dense attention, beside the largest value")
    names = ("out", "dq", "dk", "dv")
    for name, got, want in zip(names, flash_run.result, dense_run.result, strict=True):
        difference, largest = float(abs(got - want).max()), float(abs(want).max())
        print(f"          {name:4}{difference:.1e} of {largest:.1f}")


def print_row(name: str, run: Measurement) -> None:
    print(f"  {name:20}{run.seconds * 1e3:9.1f} ms{run.peak_bytes / 2**20:10.1f} MiB")
