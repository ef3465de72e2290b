"""FlashAttention-3 for JAX, called without JAX: both directions, beside PyTorch's ``fa3``.

The wheel dew-flash-attn-cu13 has Dao-AILab's kernels in a library of XLA FFI handlers, which need
neither JAX nor PyTorch. Shapes, attributes and scratch are those that its own Python passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import CDLL
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cupyflash._cuda.device import current
from cupyflash.bench.inputs import Inputs
from cupyflash.bench.workloads import Workload
from cupyflash.bench.xla_ffi import Call

__all__ = ["FlashAttention3Ffi"]

Array = Any
Work = Callable[[], Any]

_INSTALL = (
    "FlashAttention-3's library is not installed:"
    " pip install --no-deps dew-flash-attn-cu13 (it is called without JAX)"
)
_HEAD_DIMS = (64, 128, 192, 256)
_MOST_ROWS = 128  # of a tile of the backward, to which its scratch is rounded up


class FlashAttention3Ffi:
    """The handlers, on CuPy arrays."""

    name = "fa3-ffi"

    def available(self) -> str | None:
        if _installed() is None:
            return _INSTALL
        try:
            _library()
            major, minor = current().compute_capability
        except Exception as error:  # a broken installation must not end the run
            return f"{type(error).__name__}: {error}"
        if (major, minor) != (9, 0):  # where a failed launch ends the process
            return f"FlashAttention-3 needs compute capability 9.0, this GPU has {major}.{minor}"
        return None

    def supports(self, workload: Workload) -> bool:
        return (
            workload.dtype in ("float16", "bfloat16")
            and workload.head_dim in _HEAD_DIMS
            and workload.seqlen_q == workload.seqlen_k
        )

    def forward(self, workload: Workload, inputs: Inputs) -> Work:
        call = _forward(workload, inputs)
        return lambda: call()[:1]

    def backward(self, workload: Workload, inputs: Inputs) -> Work:
        query, key, value = inputs.query, inputs.key, inputs.value
        out, lse, *_ = _forward(workload, inputs)()
        rows = workload.batch * workload.seqlen_q + _MOST_ROWS * (workload.batch + 1)
        scratch = (workload.num_heads * rows,), "float32"
        gradients = [(each.shape, each.dtype) for each in (query, key, value)]
        call = Call(
            _library()["dew_flash3_mha_bwd"],
            [inputs.grad_out, query, key, value, out, lse],
            [*gradients, scratch, scratch],
            _attributes(workload),
        )
        return lambda: call()[:3]

    def arrays(self, result: Any) -> Sequence[Array]:
        return list(result)


def _forward(workload: Workload, inputs: Inputs) -> Call:
    """Return what computes out, lse, and nothing in the partial results of split keys."""
    lse = (workload.batch, workload.num_heads, workload.seqlen_q)
    return Call(
        _library()["dew_flash3_mha_fwd"],
        [inputs.query, inputs.key, inputs.value],
        [
            (inputs.query.shape, inputs.query.dtype),
            (lse, "float32"),
            ((1, 1, 1, 1), "float32"),
            ((1, 1, 1), "float32"),
        ],
        _attributes(workload),
    )


def _attributes(workload: Workload) -> dict[str, bool | int | float]:
    return {
        "softmax_scale": workload.head_dim**-0.5,
        "is_causal": workload.causal,
        "window_size_left": -1,
        "window_size_right": -1,
    }


def _installed() -> Path | None:
    """Return where the library lies; importing its package would load JAX and FlashAttention-2."""
    spec = find_spec("dew_flash_attn")
    folders = (spec and spec.submodule_search_locations) or ()
    files = (Path(folder) / "libdew_flash_attn3.so" for folder in folders)
    return next((each for each in files if each.is_file()), None)


def _library() -> CDLL:
    """Load the library. It finds CUDA's runtime in its own site-packages; else we find it."""
    path = str(_installed())
    try:
        return CDLL(path)
    except OSError:
        import_module("cuda.pathfinder").load_nvidia_dynamic_lib("cudart")
        return CDLL(path)
