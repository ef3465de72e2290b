"""What flash_attention leaves in Chainer's graph, and what bad input gets."""

from __future__ import annotations

import gc
import weakref

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer.utils.type_check import InvalidType

import cupyflash
from cupyflash.chainer import flash_attention, function
from tests import cases, reference
from tests.harness import draw, same_bits
from tests.tolerance import assert_result


@pytest.fixture
def qkv(rng):
    return tuple(rng.normal(size=(2, 6, 3, 5)) for _ in range(3))


def variables(*arrays):
    return tuple(map(chainer.Variable, arrays))


@pytest.mark.parametrize(
    "feature", ["plain", *(f for f in cases.FEATURES if f not in ("dlse", "varlen"))]
)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_same_bits_as_the_core(rng, feature, dtype):
    arguments = draw(rng, cases.Shape(), dtype, [] if feature == "plain" else [feature])
    q, k, v, dout = (arguments.pop(name) for name in ("q", "k", "v", "dout"))
    want, saved = cupyflash.flash_attention_forward(q, k, v, **arguments)
    grads = cupyflash.flash_attention_backward(dout, saved, deterministic=True)
    extras = {name: arguments.pop(name, None) for name in ("bias", "sinks")}
    extras = {name: chainer.Variable(x) for name, x in extras.items() if x is not None}
    inputs = variables(q, k, v)
    out = flash_attention(*inputs, **extras, **arguments, deterministic=True)
    assert same_bits(out.array, want)
    out.grad = dout
    out.backward()
    for name, x in (*zip("qkv", inputs, strict=True), *extras.items()):
        assert same_bits(x.grad, getattr(grads, f"d{name}")), name


def test_statistics_are_an_attribute_of_the_node(qkv):
    out = flash_attention(*variables(*qkv), causal=True)
    want, naive = (
        reference.attention(*qkv, causal=True, dtype=dtype) for dtype in (np.longdouble, np.float64)
    )
    saved = out.creator.saved
    for name in ("row_max", "row_sum"):
        assert_result(name, getattr(saved, name), want, naive)
    assert len(out.creator.outputs) == 1


def test_two_nodes(qkv):
    q, k, v = variables(*qkv)
    out = flash_attention(q, k, v, double_backward="recompute")
    grads = chainer.grad([out], [q, k, v], enable_double_backprop=True)
    assert isinstance(out.creator, function.FlashAttentionFunction)
    assert {type(g.creator) for g in grads} == {function.FlashAttentionGrad}
    assert len({id(g.creator) for g in grads}) == 1


class CatchNodes(chainer.FunctionHook):
    """Keeps the function nodes that run."""

    def __init__(self):
        self.nodes = []

    def forward_postprocess(self, node, in_data):
        self.nodes.append(node)


@pytest.mark.parametrize("backprop", [True, False])
def test_nothing_is_kept_without_backprop(qkv, backprop):
    with chainer.using_config("enable_backprop", backprop), CatchNodes() as hook:
        flash_attention(*variables(*qkv))
    (node,) = hook.nodes
    kept = node.saved, node._input_indexes_to_retain, node._output_indexes_to_retain
    assert [x is not None for x in kept] == [backprop] * 3


@pytest.mark.parametrize("kept", ["q", "out"])
@pytest.mark.parametrize("backprop", [True, False])
def test_nothing_lives_on_without_backprop(qkv, backprop, kept):
    """Inputs and intermediate results die with their last user, though out lives."""
    q, k, v = variables(*(x.copy() for x in qkv))
    with chainer.using_config("enable_backprop", backprop):
        out = flash_attention(q, k, v)
        result = out + 1
    watched = weakref.ref({"q": q.array, "out": out.array}[kept])
    del q, k, v, out
    gc.collect()
    assert (watched() is not None) == backprop
    assert np.isfinite(result.array).all()


def test_memory_is_freed_with_the_graph(qkv):
    out = flash_attention(*variables(*qkv))
    statistics = weakref.ref(out.creator.saved.row_max)
    del out
    gc.collect()
    assert statistics() is None


def test_gradient_of_one_input_only(qkv):
    q, k, v = qkv
    key = chainer.Variable(k)
    out = flash_attention(q, key, v)
    F.sum(out * out).backward()
    every = variables(q, k, v)
    out = flash_attention(*every)
    F.sum(out * out).backward()
    np.testing.assert_allclose(key.grad, every[1].grad, rtol=1e-12)


def test_second_order_needs_to_be_allowed(qkv):
    q, k, v = variables(*qkv)
    (gq,) = chainer.grad([F.sum(flash_attention(q, k, v))], [q], enable_double_backprop=True)
    with pytest.raises(cupyflash.UnsupportedError, match='double_backward="recompute"'):
        F.sum(gq * gq).backward()
    with pytest.raises(ValueError, match="double_backward must be"):
        flash_attention(q, k, v, double_backward=True)


def test_gradient_penalty_through_dependent_inputs(rng):
    """k and v are functions of q, so that a gradient by q must not be counted twice."""
    x = rng.normal(size=(1, 4, 2, 3))
    weight = rng.normal(size=x.shape)

    def penalty(x):
        x = chainer.Variable(x)
        out = flash_attention(x, F.sin(x), 2 * x, double_backward="recompute")
        (gx,) = chainer.grad([F.sum(out * weight)], [x], enable_double_backprop=True)
        loss = F.sum(gx * gx)
        loss.backward()
        return float(loss.array), x.grad

    direction, step = rng.normal(size=x.shape), 1e-5
    up, down = penalty(x + step * direction)[0], penalty(x - step * direction)[0]
    slope = (penalty(x)[1] * direction).sum()
    # The quotient is off by some 1e-10, whatever the slope; which may be near 0.
    assert slope == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-7)


def test_third_order(rng):
    q, k, v = variables(*(rng.normal(size=(1, 3, 1, 2)) for _ in range(3)))

    def derivative(order, q):
        y = F.sum(flash_attention(q, k, v, double_backward="recompute") ** 2)
        for _ in range(order):
            (y,) = chainer.grad([y], [q], enable_double_backprop=True)
            y = F.sum(y * np.cos(np.arange(y.size)).reshape(y.shape))
        return y

    step = 1e-5 * np.cos(np.arange(q.size)).reshape(q.shape)
    up, down = (derivative(2, chainer.Variable(q.array + s)).array for s in (step, -step))
    assert float(derivative(3, q).array) == pytest.approx((up - down) / 2e-5, rel=1e-4, abs=1e-7)


def test_dropout_follows_the_configuration(qkv):
    full = flash_attention(*qkv).array
    with chainer.using_config("train", False):
        assert same_bits(flash_attention(*qkv, dropout_p=0.5).array, full)
    draws = []
    for seed in (1, 1, 2):
        np.random.seed(seed)  # noqa: NPY002, Chainer's generator
        draws += [flash_attention(*qkv, dropout_p=0.5).array for _ in range(2)]
    assert same_bits(draws[0], draws[2])
    assert same_bits(draws[1], draws[3])
    assert not np.array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[0], draws[4])
    assert not np.array_equal(draws[0], full)


@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize("configured", [False, True])
def test_deterministic_follows_the_configuration(qkv, monkeypatch, asked, configured):
    seen, backward = [], cupyflash.flash_attention_backward

    def spy(*arguments, deterministic):
        seen.append(deterministic)
        return backward(*arguments, deterministic=deterministic)

    monkeypatch.setattr(cupyflash, "flash_attention_backward", spy)
    with chainer.using_config("cudnn_deterministic", configured):
        F.sum(flash_attention(*variables(*qkv), deterministic=asked)).backward()
    assert seen == [configured if asked is None else asked]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": np.zeros((2, 6, 3, 4))}, "k has shape"),
        ({"v": np.zeros((2, 6, 3, 5), np.float32)}, "float32"),
        ({"q": np.zeros((2, 6, 3, 5), np.int64)}, "q"),
        ({"mask": np.zeros((2, 6))}, "mask must have dtype bool"),
        ({"bias": np.zeros((9, 9))}, "bias must broadcast"),
        ({"sinks": np.zeros(5)}, "sinks must have shape"),
        ({"sinks": np.zeros(3, int)}, "sinks must have dtype float32"),
        ({"window": (-1, 0)}, "window"),
        ({"dropout_p": 1.0}, "dropout_p must be in"),
        ({"layout": "sbhd"}, "layout"),
    ],
)
@pytest.mark.parametrize("type_check", [True, False])
def test_bad_input_is_chainers_error_with_our_message(qkv, change, message, type_check):
    arguments = dict(zip("qkv", qkv, strict=True)) | change
    with chainer.using_config("type_check", type_check), pytest.raises(InvalidType) as caught:
        flash_attention(**arguments)
    assert message in str(caught.value)
    assert "FlashAttentionFunction (Forward)" in str(caught.value)
    assert isinstance(caught.value.__cause__, (TypeError, ValueError))


def test_unsupported_stays_unsupported(qkv):
    with pytest.raises(cupyflash.UnsupportedError):
        flash_attention(*qkv, engine="simt")


def test_score_mod_has_no_second_derivative(qkv):
    q, k, v = variables(*qkv)
    out = flash_attention(q, k, v, score_mod=cases.SCORE_MOD, double_backward="recompute")
    (gq,) = chainer.grad([F.sum(out)], [q], enable_double_backprop=True)
    with pytest.raises(cupyflash.UnsupportedError, match="score_mod"):
        F.sum(gq).backward()


def test_three_axes_and_empty_arrays(rng):
    q = chainer.Variable(rng.normal(size=(4, 2, 3)))
    out = flash_attention(q, q, q, double_backward="recompute")
    (gq,) = chainer.grad([F.sum(out**2)], [q], enable_double_backprop=True)
    F.sum(gq**2).backward()
    assert out.shape == gq.shape == q.grad.shape == (4, 2, 3)
    empty = chainer.Variable(np.zeros((2, 0, 2, 3)))
    out = flash_attention(empty, empty, empty)
    F.sum(out).backward()
    assert empty.grad.shape == empty.shape


def test_recompute_hides_what_the_core_hides(qkv, rng):
    """An infinite bias and a mask hide alike; the first row sees no key at all."""
    visible = rng.random((6, 6)) < 0.6
    visible[0] = False
    results = []
    for hiding in ({"mask": visible}, {"bias": np.where(visible, 0, -np.inf)}):
        inputs = variables(*qkv)
        out = flash_attention(*inputs, **hiding, double_backward="recompute")
        grads = chainer.grad([F.sum(out**2)], inputs, enable_double_backprop=True)
        F.sum(sum(F.sum(g**2) for g in grads)).backward()
        results.append([x.grad for x in inputs])
    for one, other in zip(*results, strict=True):
        assert np.isfinite(one).all() and one.any()
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
