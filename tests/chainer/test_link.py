"""The links: against a dense computation in Chainer, under LinkTestCase, and as links."""

from __future__ import annotations

import re

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer import testing
from chainer.utils.type_check import InvalidType

from cupyflash.chainer import FlashAttention, MultiHeadAttention
from tests.chainer.link_cases import MultiHeadCase, MultiHeadInitializersCase
from tests.harness import same_bits


@testing.parameterize(
    {},
    {"layout": "bct"},
    {"cross": True},
    {"cross": True, "layout": "bct"},
    {"num_heads_kv": 1},
    {"padded": True},
    {"padded": True, "cross": True, "causal": True},
    {"sinks": True},
    {"dtype": np.float32, "causal": True},
)
@testing.inject_backend_tests(None, [{}])
class TestMultiHeadAttention(MultiHeadCase, testing.LinkTestCase):
    pass


@testing.inject_backend_tests(None, [{}])
class TestMultiHeadInitializers(MultiHeadInitializersCase, testing.LinkInitializersTestCase):
    pass


@pytest.fixture
def x(rng):
    return rng.normal(size=(2, 9, 16)).astype(np.float32)


def make(**options):
    link = MultiHeadAttention(16, 4, sinks=True, **options)
    for param in link.params():  # biases and sinks start at 0
        param.array[...] = np.random.default_rng(param.size).normal(size=param.shape) / 4
    return link


@pytest.mark.parametrize("layout", ["btc", "bct"])
def test_npz_round_trip(x, tmp_path, layout):
    x = x if layout == "btc" else np.ascontiguousarray(x.swapaxes(1, 2))
    link = make(layout=layout)
    chainer.serializers.save_npz(tmp_path / "link.npz", link)
    other = MultiHeadAttention(16, 4, sinks=True, layout=layout)
    chainer.serializers.load_npz(tmp_path / "link.npz", other)
    assert not same_bits(MultiHeadAttention(16, 4, layout=layout)(x).array, link(x).array)
    assert same_bits(other(x).array, link(x).array)
    with np.load(tmp_path / "link.npz") as arrays:
        names = {f"{part}/{w}" for part in ("query", "key", "value", "out") for w in "Wb"}
        assert set(arrays.files) == names | {"attention/sinks"}


def test_copies_and_the_graph(x):
    link = make(causal=True)
    copied = link.copy(mode="copy")
    link.cleargrads()
    F.sum(link(x) ** 2).backward()
    assert all(param.grad.any() for param in link.params() if param is not link.key.b)
    assert same_bits(copied(x).array, link(x).array)
    copied.query.W.array[...] = 0
    assert not same_bits(copied(x).array, link(x).array)


def test_layouts_are_views_of_one_another(x):
    link = make()
    turned = make(layout="bct")
    want = link(x).array
    np.testing.assert_allclose(turned(x.swapaxes(1, 2)).array.swapaxes(1, 2), want, atol=1e-6)


def test_padding_changes_nothing(x):
    """Padded sequences give what each gives alone, whatever the padding holds."""
    link = make()
    lengths = (9, 4)
    real = np.arange(9) < np.array(lengths)[:, None]
    padded = np.where(real[..., None], x, np.float32(1e3))
    out = link(padded, padding_mask=real).array
    for n, length in enumerate(lengths):
        alone = link(x[n : n + 1, :length]).array[0]
        np.testing.assert_allclose(out[n, :length], alone, atol=1e-5)
    both = link(padded, padding_mask=real, mask=np.tri(9, dtype=bool)).array
    causal = make(causal=True)(padded, padding_mask=real).array
    np.testing.assert_allclose(both, causal, atol=1e-5)


def test_dropout_follows_the_configuration(x):
    link, without = make(dropout=0.5), make()
    assert not same_bits(link(x).array, link(x).array)
    assert same_bits(link(x, seed=3).array, link(x, seed=3).array)
    with chainer.using_config("train", False):
        assert same_bits(link(x).array, without(x).array)


def test_mixed16(x):
    """Parameters, activations and gradients are float16 as in Chainer's own links."""
    link = make(causal=True)
    with chainer.using_config("dtype", chainer.mixed16):
        half = MultiHeadAttention(16, 4, sinks=True, causal=True)
    half.copyparams(link)
    optimizer = chainer.optimizers.SGD(0.1).setup(half)
    optimizer.use_fp32_update()
    inputs = chainer.Variable(x), chainer.Variable(x.astype(np.float16))
    outs = link(inputs[0]), half(inputs[1])
    for out in outs:
        F.sum(out**2).backward()
    assert outs[1].dtype == inputs[1].grad.dtype == np.float16
    np.testing.assert_allclose(outs[1].array, outs[0].array, atol=0.02)
    for (name, param), full in zip(half.namedparams(), link.params(), strict=True):
        kept = np.float32 if name == "/attention/sinks" else np.float16
        assert param.dtype == param.grad.dtype == kept, name
        tolerance = 0.02 * max(1, abs(full.grad).max())
        np.testing.assert_allclose(param.grad, full.grad, atol=tolerance, err_msg=name)
    before = half.query.W.array.copy()
    optimizer.update()
    assert not same_bits(half.query.W.array, before)


def test_dtype_follows_the_configuration():
    for dtype in (np.float16, np.float64):
        with chainer.using_config("dtype", dtype):
            link = MultiHeadAttention(8, 2, sinks=True)
        assert link.query.W.dtype == link.out.b.dtype == dtype
        assert link.attention.sinks.dtype == np.float32
        assert link(np.ones((1, 3, 8), dtype)).dtype == dtype


def test_an_optimizer_trains_it(x):
    """Every token shall find the one that carries a flag; attention alone can carry it over."""
    rng = np.random.default_rng(0)
    link = MultiHeadAttention(16, 2)
    optimizer = chainer.optimizers.Adam(0.01).setup(link)
    inputs = rng.normal(size=(16, 6, 16)).astype(np.float32)
    inputs[..., 0] = 0
    inputs[np.arange(16), rng.integers(6, size=16), 0] = 4
    target = inputs[inputs[..., 0] > 0][:, None].repeat(6, axis=1)
    losses = []

    def loss():
        losses.append(F.mean_squared_error(link(inputs), target))
        return losses[-1]

    for _ in range(150):
        optimizer.update(loss)
    assert losses[-1].array < 0.1 * losses[0].array


def test_flash_attention_link(rng):
    q, k, v = (rng.normal(size=(2, 3, 5, 4)).astype(np.float32) for _ in range(3))
    link = FlashAttention(layout="bhsd", sinks=3, initial_sinks=np.float32([0, 1, 2]), softcap=2.0)
    assert link.sinks.dtype == np.float32
    assert link(q, k, v, mask=np.tri(5, dtype=bool)).shape == (2, 3, 5, 4)
    assert str(link) == "FlashAttention(softcap=2.0, layout=bhsd)"
    assert "causal=True" in str(MultiHeadAttention(4, 2, causal=True))
    assert not list(FlashAttention().params())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": np.zeros((5, 16), np.float32)}, "query must have 3 axes"),
        ({"key": np.zeros((1, 2, 9, 16), np.float32)}, "key must have 3 axes"),
        ({"padding_mask": np.ones(9, bool)}, "padding_mask must have shape (B, T of the keys)"),
        ({"padding_mask": np.ones((2, 9))}, "padding_mask must have dtype bool"),
        ({"padding_mask": [[True] * 9] * 2}, "padding_mask must be an array"),
        ({"padding_mask": np.ones((2, 8), bool)}, "mask must broadcast to (b, h, sq, sk)"),
        ({"mask": np.ones((9, 9))}, "mask must have dtype bool"),
        ({"mask": np.ones((4, 4), bool)}, "mask, shape (4, 4), dtype bool, does not go with"),
        ({"seed": "a", "dropout": 0.5}, "seed must hold integers"),
        ({"dropout": 1.5}, "dropout_p must be in"),
    ],
)
def test_bad_input_is_an_invalid_type(x, change, message):
    """Chainer's own error, with our words."""
    arguments = {"query": x, "padding_mask": np.ones((2, 9), bool)} | change
    link = MultiHeadAttention(16, 4, dropout=arguments.pop("dropout", 0.0))
    with pytest.raises(InvalidType, match=re.escape(message)):
        link(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embed_dim": 10, "num_heads": 4}, "embed_dim must be a multiple"),
        ({"embed_dim": 8, "num_heads": 4, "num_heads_kv": 3}, "num_heads must be a multiple"),
        ({"embed_dim": 8, "num_heads": 0}, "embed_dim must be a multiple"),
        ({"embed_dim": 8, "num_heads": 2, "layout": "tbc"}, "layout must be one of"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(**arguments)


@pytest.mark.parametrize("layout", ["btc", "bct"])
@pytest.mark.parametrize("shape", [(0, 5, 8), (3, 0, 8), (0, 0, 8)])
def test_nothing_to_attend_from(layout, shape):
    """As in NumPy, no rows in are no rows out; they leave gradients of parameters at 0."""
    axes = (0, 1, 2) if layout == "btc" else (0, 2, 1)
    x = chainer.Variable(np.zeros(shape, np.float32).transpose(axes))
    link = MultiHeadAttention(8, 2, layout=layout, sinks=True)
    link.cleargrads()
    out = link(x)
    out.grad = np.zeros(out.shape, np.float32)
    out.backward()
    assert out.shape == x.grad.shape == x.shape and out.dtype == np.float32
    assert not any(param.grad.any() for param in link.params())


def test_nothing_to_attend_to(rng):
    """Queries that see no key come out as the output's bias."""
    link = MultiHeadAttention(8, 2, initial_bias=chainer.initializers.Normal())
    link.cleargrads()
    x = chainer.Variable(rng.normal(size=(2, 3, 8)).astype(np.float32))
    key = chainer.Variable(np.zeros((2, 0, 8), np.float32))
    out = link(x, key)
    np.testing.assert_array_equal(out.array, np.broadcast_to(link.out.b.array, (2, 3, 8)))
    out.grad = np.ones(out.shape, np.float32)
    out.backward()
    assert not x.grad.any() and key.grad.shape == key.shape
    np.testing.assert_array_equal(link.out.b.grad, 6)


@pytest.mark.parametrize(
    ("make", "error", "named"),
    [
        (lambda: FlashAttention(sinks=0), ValueError, "sinks"),
        (lambda: FlashAttention(sinks=-1), ValueError, "sinks"),
        (lambda: FlashAttention(sinks="a"), TypeError, "sinks"),
        (lambda: FlashAttention(sinks=True), TypeError, "sinks"),
        (lambda: FlashAttention(initial_sinks=1), ValueError, "initial_sinks"),
        (lambda: MultiHeadAttention(8, 2, initial_sinks=1), ValueError, "initial_sinks"),
        (lambda: MultiHeadAttention(0, 1), ValueError, "embed_dim"),
        (lambda: MultiHeadAttention(8, 2.0), TypeError, "num_heads"),
        (lambda: MultiHeadAttention("8", 2), TypeError, "embed_dim"),
        (lambda: MultiHeadAttention(8, 4, num_heads_kv=3), ValueError, "num_heads"),
    ],
)
def test_sizes_that_are_none_are_named(make, error, named):
    with pytest.raises(error, match=named):
        make()
