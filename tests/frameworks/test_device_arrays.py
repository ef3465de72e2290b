"""Arrays of other frameworks on the GPU: the same memory, the same bits, and back without a copy.

Their host arrays are in tests/unit/test_arrays.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import cupyflash
from tests.frameworks.conftest import ON_GPU

pytestmark = list(ON_GPU)


class Framework(NamedTuple):
    """How one framework takes a NumPy array to its GPU, and a CuPy array without a copy."""

    put: Any
    take: Any
    address: Any


def torch_framework() -> Framework:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no GPU")
    return Framework(
        lambda x: torch.from_numpy(x).cuda(), torch.from_dlpack, lambda x: x.data_ptr()
    )


def jax_framework() -> Framework:
    jax = pytest.importorskip("jax")
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        pytest.skip("this JAX has no GPU")
    return Framework(
        lambda x: jax.device_put(x, device),
        jax.dlpack.from_dlpack,
        lambda x: x.unsafe_buffer_pointer(),
    )


def numba_framework() -> Framework:
    cuda = pytest.importorskip("numba.cuda")
    if not cuda.is_available():
        pytest.skip("this Numba has no GPU")
    return Framework(
        cuda.to_device, cuda.as_cuda_array, lambda x: x.__cuda_array_interface__["data"][0]
    )


FRAMEWORKS = {"torch": torch_framework, "jax": jax_framework, "numba": numba_framework}


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_memory_is_shared_both_ways(rng, name, dtype):
    import cupy

    framework = FRAMEWORKS[name]()
    host = [rng.standard_normal((2, 50, 4, 32)).astype(dtype) for _ in range(4)]
    q, k, v, dout = arrays = [framework.put(x) for x in host]
    out, saved = cupyflash.flash_attention_forward(q, k, v, causal=True)
    grads = cupyflash.flash_attention_backward(dout, saved, deterministic=True)
    shared = [saved.q, saved.k, saved.v]
    assert [x.data.ptr for x in shared] == [framework.address(x) for x in arrays[:3]]

    right, same = cupyflash.flash_attention_forward(*map(cupy.asarray, host[:3]), causal=True)
    right_grads = cupyflash.flash_attention_backward(
        cupy.asarray(host[3]), same, deterministic=True
    )
    for got, want in zip((out, *grads[:3]), (right, *right_grads[:3]), strict=True):
        np.testing.assert_array_equal(got.get(), want.get())
        assert framework.address(framework.take(got)) == got.data.ptr
