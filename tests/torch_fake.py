"""As much of PyTorch as the peer ``torch-flex`` uses, on NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np


class Tensor(np.ndarray):
    """An array that knows the gradients of what it was computed from."""

    gradients: Callable[[np.ndarray], Sequence[np.ndarray]] | None = None

    def __array_finalize__(self, other: Any) -> None:
        self.gradients = getattr(other, "gradients", None)

    def transpose(self, one: int, other: int) -> Any:  # type: ignore[override]
        return self.swapaxes(one, other)

    def requires_grad_(self) -> Tensor:
        return self

    def detach(self) -> Tensor:
        return self


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score_mod: Callable[..., Any],
    block_mask: Any = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Dense; the derivative of ``score_mod`` is a complex step's, the gradient of a bias is dS."""
    groups = query.shape[1] // key.shape[1]
    assert enable_gqa == (groups > 1)
    keys, values = (np.repeat(np.asarray(each), groups, axis=1) for each in (key, value))
    scale = query.shape[-1] ** -0.5
    scores = np.asarray(query) @ keys.swapaxes(-1, -2) * scale
    indices = np.ogrid[tuple(map(slice, scores.shape))]
    changed = np.asarray(score_mod(scores + 1e-20j, *indices))
    slopes = changed.imag / 1e-20
    seen = True if block_mask is None else block_mask(*indices)
    exponentials = np.where(seen, np.exp(changed.real - changed.real.max(-1, keepdims=True)), 0)
    weights = exponentials / exponentials.sum(-1, keepdims=True)
    out = (weights @ values).astype(query.dtype).view(Tensor)

    def gradients(grad_out: np.ndarray) -> list[np.ndarray]:
        grad_weights = grad_out @ values.swapaxes(-1, -2)
        dots = (grad_weights * weights).sum(-1, keepdims=True)
        grad_bias = weights * (grad_weights - dots)
        grad_scores = grad_bias * slopes * scale
        heads_of = (*key.shape[:2], groups, *key.shape[2:])
        grad_key = (grad_scores.swapaxes(-1, -2) @ np.asarray(query)).reshape(heads_of).sum(2)
        grad_value = (weights.swapaxes(-1, -2) @ grad_out).reshape(heads_of).sum(2)
        whole = [grad_scores @ keys, grad_key, grad_value]
        return [*(each.swapaxes(1, 2) for each in whole), grad_bias]

    out.gradients = gradients
    return out


def modules() -> dict[str, ModuleType]:
    """Return what is to stand in ``sys.modules``."""
    torch = ModuleType("torch")
    flex = ModuleType("torch.nn.attention.flex_attention")

    def compile(function: Any, dynamic: bool) -> Any:
        assert not dynamic
        return function

    def grad(out: Tensor, leaves: Any, grad_out: Tensor, retain_graph: bool) -> list[Tensor]:
        assert retain_graph and out.gradients is not None
        found = out.gradients(np.asarray(grad_out).swapaxes(1, 2))
        return [each.astype(out.dtype).view(Tensor) for each in found[: len(leaves)]]

    torch.compile, torch.tanh, torch.uint8 = compile, np.tanh, np.uint8
    torch.from_dlpack = lambda array: np.asarray(array).view(Tensor)
    torch.cuda = ModuleType("torch.cuda")
    torch.cuda.is_available = lambda: True
    torch.autograd = ModuleType("torch.autograd")
    torch.autograd.grad = grad
    flex.flex_attention = flex_attention
    flex.create_block_mask = lambda seen, b, h, sq, sk, device: seen
    return {"torch": torch, flex.__name__: flex}
