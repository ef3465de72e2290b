"""Peers that need PyTorch, which nothing else here does; they share our arrays by DLPack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from cupyflash._cuda.device import require_cupy
from cupyflash.bench.inputs import Inputs
from cupyflash.bench.workloads import Workload

__all__ = [
    "TorchPeer",
    "cannot_import",
    "ceiling_tflops",
    "cupy_arrays",
    "flash_attn",
    "materialised",
    "sdpa",
    "tensors",
]

Array = Any
Tensor = Any
Work = Callable[[], Any]
Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]  # (b, s, h, d) tensors, causal


def cannot_import(module: str) -> str | None:
    """Return why PyTorch with a GPU, or `module`, cannot be used here."""
    try:
        torch = import_module("torch")
        import_module(module)
    except Exception as error:  # a broken wheel may raise anything, and must not end the run
        return f"{type(error).__name__}: {error}"
    return None if torch.cuda.is_available() else "PyTorch finds no usable GPU"


@dataclass(frozen=True)
class TorchPeer:
    """A function of PyTorch tensors with a gradient.

    Parameters
    ----------
    name : str
    load : callable
        Imports what is needed and returns the function.
    module : str
        What must be importable.
    bottom_right : bool
        Whether its causal mask is aligned as ours where lengths differ.
    dense : bool
        Whether it keeps all scores; then heads are not grouped.
    float8 : bool
        Whether it takes e4m3 tensors.
    """

    name: str
    load: Callable[[], Attend]
    module: str = "torch"
    bottom_right: bool = True
    dense: bool = False
    float8: bool = False

    def available(self) -> str | None:
        return cannot_import(self.module)

    def supports(self, workload: Workload) -> bool:
        if self.dense:
            return workload.dense_fits
        if workload.is_float8 and not self.float8:
            return False
        return workload.dtype != "float32" and (self.bottom_right or not workload.has_corner)

    def forward(self, workload: Workload, inputs: Inputs) -> Work:
        attend = self.load()
        query, key, value, _ = tensors(inputs)
        return lambda: attend(query, key, value, workload.causal)

    def backward(self, workload: Workload, inputs: Inputs) -> Work:
        torch = import_module("torch")
        *given, grad_out = tensors(inputs)
        leaves = [each.detach().requires_grad_() for each in given]
        query, key, value = leaves
        out = self.load()(query, key, value, workload.causal)
        return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

    def arrays(self, result: Any) -> Sequence[Array]:
        return cupy_arrays(result)


def sdpa(backend: str) -> Callable[[], Attend]:
    """PyTorch's scaled_dot_product_attention, held to one backend."""

    def load() -> Attend:
        functional = import_module("torch.nn.functional")
        attention = import_module("torch.nn.attention")
        chosen = getattr(attention.SDPBackend, backend)

        def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
            grouped = query.shape[2] != key.shape[2]
            heads_first = (each.transpose(1, 2) for each in (query, key, value))
            with attention.sdpa_kernel(chosen):
                out = functional.scaled_dot_product_attention(
                    *heads_first, is_causal=causal, enable_gqa=grouped
                )
            return out.transpose(1, 2)

        return attend

    return load


def flash_attn(module: str) -> Callable[[], Attend]:
    """FlashAttention-3 or -4, by the function that both packages have."""

    def load() -> Attend:
        function = import_module(module).flash_attn_func

        def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
            result = function(query, key, value, causal=causal)
            return result[0] if isinstance(result, tuple) else result  # some also return lse

        return attend

    return load


def materialised(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Standard attention at its best: cuBLAS products in the dtype, one fused softmax between."""
    torch = import_module("torch")
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    if causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        hidden = ones.triu(key.shape[2] - query.shape[2] + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return (torch.softmax(scores, -1) @ value).transpose(1, 2)


def tensors(inputs: Inputs) -> list[Tensor]:
    """Return query, key, value and grad_out as tensors over the same memory."""
    torch = import_module("torch")
    arrays = (inputs.query, inputs.key, inputs.value, inputs.grad_out)
    shared = (torch.from_dlpack(each) for each in arrays)
    return [x.view(torch.float8_e4m3fn) if x.dtype == torch.uint8 else x for x in shared]


def cupy_arrays(result: Any) -> list[Array]:
    """Return a tensor, or each of several, as CuPy arrays over the same memory."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    return [require_cupy().from_dlpack(each.detach()) for each in results]


def ceiling_tflops(time: Callable[[dict[str, Work]], dict[str, float]]) -> float | None:
    """Return what a bfloat16 product of 8192^3 reaches here; None without PyTorch."""
    if cannot_import("torch"):
        return None
    torch = import_module("torch")
    one, other = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / time({"product": lambda: one @ other})["product"] / 1e9
