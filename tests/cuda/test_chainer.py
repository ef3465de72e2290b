"""tests/chainer on CuPy arrays."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("chainer") is None:
    pytest.skip("Chainer is not installed", allow_module_level=True)

import cupyflash.chainer  # isort: split

import chainer
import numpy as np
from chainer import testing

from tests import cases
from tests.chainer.function_cases import FEATURES, FlashAttentionCase
from tests.chainer.link_cases import MultiHeadCase, MultiHeadInitializersCase

GPU = [{"use_cuda": True}]
SERVED = [f for f in FEATURES if f == "plain" or f in cases.SUPPORTED["simt"]]


@testing.parameterize(
    *({"feature": feature} for feature in SERVED),
    {"feature": "causal", "layout": "bhsd"},
    {"feature": "causal", "dtype": np.float16},
    {"feature": "causal", "dtype": np.float32},
)
@testing.inject_backend_tests(None, GPU)
class TestFlashAttention(FlashAttentionCase, testing.FunctionTestCase):
    pass


@testing.parameterize(
    {},
    {"layout": "bct"},
    {"cross": True, "num_heads_kv": 1},
    {"sinks": True, "causal": True},
    {"dtype": np.float32},
    *([{"padded": True}] if "mask" in cases.SUPPORTED["simt"] else []),
)
@testing.inject_backend_tests(None, GPU)
class TestMultiHeadAttention(MultiHeadCase, testing.LinkTestCase):
    pass


@testing.inject_backend_tests(None, GPU)
class TestMultiHeadInitializers(MultiHeadInitializersCase, testing.LinkInitializersTestCase):
    pass


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_link_moves_to_the_gpu(rng, dtype):
    with chainer.using_config("dtype", dtype):
        link = cupyflash.chainer.MultiHeadAttention(32, 4, causal=True, sinks=True)
    x = rng.normal(size=(2, 33, 32)).astype(dtype)
    want = link(x).array
    link.to_device("@cupy:0")
    out = link(chainer.Variable(link.xp.asarray(x)))
    chainer.functions.sum(out).backward()
    tolerance = 1e-2 if dtype == np.float16 else 1e-5
    np.testing.assert_allclose(out.array.get(), want, atol=tolerance)
    assert link.attention.sinks.grad.device.id == 0


@pytest.mark.parametrize("name", ["grads", "params"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_parallel_updater_gathers_and_scatters(rng, name, dtype):
    """The kernels that CuPy 14 did not compile."""
    from chainer.training.updaters import multiprocess_parallel_updater as updater

    with chainer.using_config("dtype", dtype):
        link = cupyflash.chainer.MultiHeadAttention(8, 2)
    link.to_device("@cupy:0")
    for param in link.params():
        param.grad = link.xp.asarray(rng.normal(size=param.shape).astype(dtype))
    target = "grad" if name == "grads" else "data"
    parts = [getattr(param, target) for _, param in sorted(link.namedparams())]
    want = np.concatenate([part.get().ravel() for part in parts])
    gathered = getattr(updater, f"gather_{name}")(link)
    np.testing.assert_array_equal(gathered.get(), want.astype(np.float32))
    getattr(updater, f"scatter_{name}")(link, gathered * 2)
    got = np.concatenate([part.get().ravel() for part in parts])
    np.testing.assert_array_equal(got, (want * 2).astype(dtype))
