"""cuDNN's attention without PyTorch's; tensors are PyTorch's all the same, as in its samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from cupyflash.bench.inputs import Inputs
from cupyflash.bench.torch_peers import cannot_import, cupy_arrays, tensors
from cupyflash.bench.workloads import Workload

__all__ = ["CudnnFrontend"]

Array = Any
Tensor = Any
Work = Callable[[], Any]


class CudnnFrontend:
    """cuDNN's attention graphs, built once for a workload by its own Python front end."""

    name = "cudnn-frontend"

    def available(self) -> str | None:
        return cannot_import("cudnn")

    def supports(self, workload: Workload) -> bool:
        return workload.dtype in ("float16", "bfloat16") and not workload.has_corner

    def forward(self, workload: Workload, inputs: Inputs) -> Work:
        return self._forward(workload, inputs, save=False)

    def backward(self, workload: Workload, inputs: Inputs) -> Work:
        torch = import_module("torch")
        *given, grad_out = (each.transpose(1, 2) for each in tensors(inputs))
        out, stats = self._forward(workload, inputs, save=True)()
        read = [*given, out, grad_out, stats]
        graph, handle = _graph(workload)
        nodes = [graph.tensor_like(each) for each in read]
        names = ("q", "k", "v", "o", "dO", "stats")
        results = graph.sdpa_backward(
            **dict(zip(names, nodes, strict=True)),
            attn_scale=workload.head_dim**-0.5,
            use_causal_mask=workload.causal,
        )
        bound = dict(zip(nodes, read, strict=True))
        return _work(
            graph, handle, bound, results, lambda: [torch.empty_like(each) for each in given]
        )

    def _forward(self, workload: Workload, inputs: Inputs, save: bool) -> Work:
        torch = import_module("torch")
        read = [each.transpose(1, 2) for each in tensors(inputs)[:3]]
        graph, handle = _graph(workload)
        nodes = [graph.tensor_like(each) for each in read]
        out, stats = graph.sdpa(
            **dict(zip("qkv", nodes, strict=True)),
            is_inference=not save,
            attn_scale=workload.head_dim**-0.5,
            use_causal_mask=workload.causal,
        )
        shape = (workload.batch, workload.num_heads, workload.seqlen_q, 1)

        def empty() -> list[Tensor]:
            made = [torch.empty_like(read[0])]
            if save:
                made.append(torch.empty(shape, dtype=torch.float32, device=read[0].device))
            return made

        if save:
            stats.set_data_type(import_module("cudnn").data_type.FLOAT)
        results = [out, stats] if save else [out]
        return _work(graph, handle, dict(zip(nodes, read, strict=True)), results, empty)

    def arrays(self, result: Any) -> Sequence[Array]:
        return [each.swapaxes(1, 2) for each in cupy_arrays(result)]


def _graph(workload: Workload) -> tuple[Any, Any]:
    cudnn = import_module("cudnn")
    kinds = {"float16": cudnn.data_type.HALF, "bfloat16": cudnn.data_type.BFLOAT16}
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(
        io_data_type=kinds[workload.dtype],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    return graph, handle


def _work(
    graph: Any,
    handle: Any,
    bound: dict[Any, Tensor],
    results: Sequence[Any],
    empty: Callable[[], list[Tensor]],
) -> Work:
    """Build the graph; the work allocates as every peer does, and returns ``(b, h, s, d)``."""
    cudnn, torch = import_module("cudnn"), import_module("torch")
    for node, like in zip(results, empty(), strict=True):
        node.set_output(True).set_dim(like.size()).set_stride(like.stride())
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    size = max(1, graph.get_workspace_size())

    def work() -> list[Tensor]:
        made = empty()
        workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
        graph.execute({**bound, **dict(zip(results, made, strict=True))}, workspace, handle=handle)
        return made

    return work
