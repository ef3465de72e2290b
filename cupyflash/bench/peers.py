"""Who takes part: cupyflash, and what other people's code does with the same arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from cupyflash._arrays import place_of
from cupyflash._cuda.device import require_cupy
from cupyflash.attention import (
    flash_attention,
    flash_attention_backward,
    flash_attention_forward,
)
from cupyflash.bench.cudnn_peer import CudnnFrontend
from cupyflash.bench.fa3_ffi_peer import FlashAttention3Ffi
from cupyflash.bench.inputs import Inputs
from cupyflash.bench.torch_peers import (
    TorchPeer,
    flash_attn,
    materialised,
    sdpa,
)
from cupyflash.bench.workloads import Workload
from cupyflash.errors import NoDeviceError

__all__ = ["PEERS", "Contender", "Ours"]

Array = Any
Work = Callable[[], Any]


class Contender(Protocol):
    """Someone who computes attention. Works return what `arrays` turns into CuPy arrays."""

    @property
    def name(self) -> str:
        """The name in tables and after ``--peers``."""
        ...

    def available(self) -> str | None:
        """Return why this machine cannot run it, or None."""
        ...

    def supports(self, workload: Workload) -> bool:
        """Whether it can compute `workload`, and has the memory for it."""
        ...

    def forward(self, workload: Workload, inputs: Inputs) -> Work:
        """Return what computes out."""
        ...

    def backward(self, workload: Workload, inputs: Inputs) -> Work:
        """Run the forward and return what computes (dq, dk, dv) from what it saved."""
        ...

    def arrays(self, result: Any) -> Sequence[Array]:
        """Return a work's result as ``(b, s, h, d)`` arrays."""
        ...


class Ours:
    """cupyflash, by its public functions."""

    name = "cupyflash"

    def __init__(self, engine: str | None = None) -> None:
        self.engine = engine

    def available(self) -> str | None:
        return _no_gpu()

    def supports(self, workload: Workload) -> bool:
        return True

    def forward(self, workload: Workload, inputs: Inputs) -> Work:
        return lambda: flash_attention(
            inputs.query, inputs.key, inputs.value, causal=workload.causal, engine=self.engine
        )

    def backward(self, workload: Workload, inputs: Inputs) -> Work:
        _, saved = flash_attention_forward(
            inputs.query, inputs.key, inputs.value, causal=workload.causal, engine=self.engine
        )
        return lambda: flash_attention_backward(inputs.grad_out, saved)

    def arrays(self, result: Any) -> Sequence[Array]:
        return result[:3] if isinstance(result, tuple) else (result,)


class NaiveCupy:
    """Dense attention as a CuPy user writes it: product, softmax, product; O(s^2) memory."""

    name = "naive-cupy"

    def available(self) -> str | None:
        return _no_gpu()

    def supports(self, workload: Workload) -> bool:
        return workload.dtype != "bfloat16" and workload.dense_fits  # CuPy multiplies no bfloat16

    def forward(self, workload: Workload, inputs: Inputs) -> Work:
        query, key, value = _heads_first(inputs.query, inputs.key, inputs.value)
        return lambda: naive_weights(query, key, workload.causal) @ value

    def backward(self, workload: Workload, inputs: Inputs) -> Work:
        query, key, value, grad_out = _heads_first(
            inputs.query, inputs.key, inputs.value, inputs.grad_out
        )
        weights = naive_weights(query, key, workload.causal)
        return lambda: naive_gradients(query, key, value, grad_out, weights)

    def arrays(self, result: Any) -> Sequence[Array]:
        results = result if isinstance(result, tuple) else (result,)
        return [each.swapaxes(1, 2) for each in results]


def naive_weights(query: Array, key: Array, causal: bool) -> Array:
    """Softmax of all scores of ``(b, h, s, d)`` arrays, computed in float32."""
    xp = place_of(query).namespace
    scores = (query @ key.swapaxes(-1, -2)).astype(xp.float32, copy=False)
    scores *= query.shape[-1] ** -0.5
    if causal:
        seqlen_q, seqlen_k = scores.shape[-2:]
        visible = xp.tri(seqlen_q, seqlen_k, seqlen_k - seqlen_q, dtype=bool)
        scores = xp.where(visible, scores, xp.float32(-xp.inf))
    scores -= scores.max(axis=-1, keepdims=True)
    xp.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores.astype(query.dtype, copy=False)


def naive_gradients(
    query: Array, key: Array, value: Array, grad_out: Array, weights: Array
) -> tuple[Array, Array, Array]:
    """Return dq, dk, dv of dense attention from its saved weights."""
    scale = query.shape[-1] ** -0.5
    grad_value = weights.swapaxes(-1, -2) @ grad_out
    grad_scores = (grad_out @ value.swapaxes(-1, -2)).astype("float32", copy=False)
    grad_scores *= weights
    grad_scores -= weights * grad_scores.sum(axis=-1, keepdims=True)
    grad_scores *= scale
    grad_scores = grad_scores.astype(query.dtype, copy=False)
    return grad_scores @ key, grad_scores.swapaxes(-1, -2) @ query, grad_value


def _heads_first(*arrays: Array) -> list[Array]:
    return [each.swapaxes(1, 2).copy(order="C") for each in arrays]


def _no_gpu() -> str | None:
    try:
        require_cupy()
    except NoDeviceError as error:
        return str(error)
    return None


PEERS: dict[str, Contender] = {
    peer.name: peer
    for peer in (
        NaiveCupy(),
        TorchPeer("materialised", lambda: materialised, dense=True),
        TorchPeer("torch-flash", sdpa("FLASH_ATTENTION"), bottom_right=False),
        TorchPeer("torch-cudnn", sdpa("CUDNN_ATTENTION"), bottom_right=False),
        TorchPeer("fa3", flash_attn("flash_attn_interface"), "flash_attn_interface", float8=True),
        FlashAttention3Ffi(),
        TorchPeer("fa4", flash_attn("flash_attn.cute.interface"), "flash_attn.cute.interface"),
        CudnnFrontend(),
    )
}
