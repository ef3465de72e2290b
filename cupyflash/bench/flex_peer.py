"""The peer ``torch-flex``: PyTorch's compiled FlexAttention, for features that it can express."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from cupyflash.bench.inputs import TOLERANCE, Inputs, disagreement
from cupyflash.bench.torch_peers import cannot_import, cupy_arrays, tensors
from cupyflash.bench.workloads import Workload

__all__ = ["NAME", "ScoreMod", "add_bias", "cap_scores", "check", "missing", "prepare"]

Tensor = Any
Work = Callable[[], Any]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # score, b, h, i, j

NAME = "torch-flex"
_MODULE = "torch.nn.attention.flex_attention"


def missing() -> str | None:
    """Return why it cannot take part."""
    return cannot_import(_MODULE)


def cap_scores(options: Mapping[str, Any]) -> ScoreMod:
    """Return the score_mod of ``softcap``."""
    tanh, cap = import_module("torch").tanh, options["softcap"]
    return lambda score, b, h, i, j: cap * tanh(score / cap)


def add_bias(options: Mapping[str, Any]) -> ScoreMod:
    """Return the score_mod of a dense ``bias``, of one sequence or of each."""
    bias = options["bias"]
    if len(bias) == 1:
        return lambda score, b, h, i, j: score + bias[0, h, i, j]
    return lambda score, b, h, i, j: score + bias[b, h, i, j]


def prepare(
    score_of: Callable[[Mapping[str, Any]], ScoreMod],
    workload: Workload,
    inputs: Inputs,
    options: Mapping[str, Any],
) -> dict[str, Callable[[], Work]]:
    """Return what prepares each direction; gradients of arrays among the options are included."""
    torch, module = import_module("torch"), import_module(_MODULE)
    compiled = torch.compile(module.flex_attention, dynamic=False)
    *given, grad_out = tensors(inputs)
    extras = {
        name: torch.from_dlpack(value) for name, value in options.items() if hasattr(value, "shape")
    }
    score_mod = score_of({**options, **extras})
    more: dict[str, Any] = {"score_mod": score_mod}
    if workload.num_heads != workload.num_heads_kv:
        more["enable_gqa"] = True
    if workload.causal:
        diagonal = workload.seqlen_k - workload.seqlen_q
        more["block_mask"] = module.create_block_mask(
            lambda b, h, i, j: j <= i + diagonal,
            None,
            None,
            workload.seqlen_q,
            workload.seqlen_k,
            device=given[0].device,
        )

    def attend() -> Tensor:
        query, key, value = (each.transpose(1, 2) for each in given)
        return compiled(query, key, value, **more).transpose(1, 2)

    def backward() -> Work:
        leaves = [*given, *extras.values()]
        for each in leaves:
            each.requires_grad_()
        out = attend()
        return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

    return {"forward": lambda: attend, "backward": backward}


def check(workload: Workload, ours: Any, theirs: Any) -> None:
    """Raise ArithmeticError if it computes something else than we: out, or (dq, dk, dv)."""
    mine = [ours] if hasattr(ours, "shape") else list(ours[:3])
    error = disagreement(mine, cupy_arrays(theirs)[: len(mine)])
    if not error <= 2 * TOLERANCE[workload.dtype]:
        raise ArithmeticError(f"{NAME} differs by {error:.2g} of the norm")
