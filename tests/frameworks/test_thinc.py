"""The thinc layers against the dense reference, in every container, and inside spaCy."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.frameworks.conftest import ON_GPU
from tests.memory import to_host
from tests.reference import attention_varlen
from tests.tolerance import assert_result

pytest.importorskip("thinc", reason="thinc is not installed")

from thinc.api import (
    CupyOps,
    Linear,
    NumpyOps,
    Ragged,
    chain,
    fix_random_seed,
    registry,
    set_dropout_rate,
    use_ops,
    with_array,
)
from thinc.util import DataValidationError

from cupyflash.thinc import FlashAttention, MultiHeadAttention, TransformerEncoder

LENGTHS = [5, 0, 17, 1]
BOUNDS = np.cumsum([0, *LENGTHS], dtype=np.int32)
HEADS, HEADS_KV, DIM = 4, 2, 8


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=ON_GPU)])
def ops(request: Any) -> Any:
    with use_ops(request.param):
        yield {"numpy": NumpyOps, "cupy": CupyOps}[request.param]()


def ragged(ops: Any, data: Any, lengths: Any = LENGTHS) -> Ragged:
    return Ragged(ops.asarray2f(data), ops.asarray1i(lengths))


def turned(heads: Any, bounds: Any = BOUNDS, *, back: bool = False) -> Any:
    """Rotary positions as complex factors, in float64."""
    half = heads.shape[-1] // 2
    position = np.concatenate([np.arange(stop - start) for start, stop in pairwise(bounds)])
    angle = position[:, None, None] * 10000.0 ** (-np.arange(half) / half)
    pairs = heads[..., :half] + 1j * heads[..., half:].astype(np.float64)
    pairs = pairs * np.exp((-1j if back else 1j) * angle)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": [2, 1]}, {"window": (3, None), "causal": True}]
)
def test_layer_is_the_dense_formula(ops, rng, options, rotary):
    data = rng.standard_normal((sum(LENGTHS), HEADS + 2 * HEADS_KV, DIM), dtype=np.float32)
    dout = rng.standard_normal((sum(LENGTHS), HEADS, DIM), dtype=np.float32)
    layer = FlashAttention(HEADS, DIM, num_heads_kv=HEADS_KV, rotary=rotary, **options)
    layer.initialize()
    out, backprop = layer.begin_update(ragged(ops, data.reshape(len(data), -1)))
    grad = backprop(ragged(ops, dout.reshape(len(dout), -1)))

    q, k, v = np.split(data.astype(np.float64), [HEADS, HEADS + HEADS_KV], axis=1)
    if rotary:
        q, k = turned(q), turned(k)

    def dense(dtype: Any) -> Any:
        *arrays, grad_out = (x.astype(dtype) for x in (q, k, v, dout))
        result = attention_varlen(
            *arrays, BOUNDS, BOUNDS, dout=grad_out, dtype=dtype, inputs=data.dtype, **options
        )
        if not rotary:
            return result
        dq, dk = (turned(x, back=True).astype(dtype) for x in (result.dq, result.dk))
        return result._replace(dq=dq, dk=dk)

    right, naive = dense(np.float64), dense(np.float32)
    grads = np.split(to_host(grad.data).reshape(data.shape), [HEADS, HEADS + HEADS_KV], axis=1)
    assert_result("out", to_host(out.data).reshape(dout.shape), right, naive)
    for name, got in zip(("dq", "dk", "dv"), grads, strict=True):
        assert_result(name, got, right, naive)
    np.testing.assert_array_equal(to_host(grad.lengths), LENGTHS)


def test_containers_agree(ops, rng):
    """Ragged, Padded and list: the same numbers, forward and backward."""
    lengths = [3, 9, 1]
    rows = [ops.asarray2f(rng.standard_normal((n, 16), dtype=np.float32)) for n in lengths]
    layer = MultiHeadAttention(16, 4)
    layer.initialize(X=rows)
    packed = Ragged(ops.flatten(rows), ops.asarray1i(lengths))
    out, backprop = layer.begin_update(packed)
    expected = to_host(out.data), to_host(backprop(out).data)
    for give, take in ((lambda x: x, lambda x: x), (ops.list2padded, ops.padded2list)):
        out, backprop = layer.begin_update(give(rows))
        got = take(out), take(backprop(out))
        for part, right in zip(got, expected, strict=True):
            np.testing.assert_allclose(to_host(ops.flatten(part)), right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lengths", [[0, 0], []])
def test_batches_without_tokens(ops, lengths):
    """As wide as others, forward and backward; nothing warns of means of nothing."""
    empty = ops.alloc2f(0, 16)
    layer = FlashAttention(4, 8, num_heads_kv=2)
    layer.initialize()
    out, backprop = layer.begin_update(Ragged(ops.alloc2f(0, 64), ops.asarray1i(lengths)))
    grad = backprop(out)
    assert (out.dataXd.shape, grad.dataXd.shape) == ((0, 32), (0, 64))
    assert out.dataXd.dtype == np.float32
    assert list(to_host(out.lengths)) == list(to_host(grad.lengths)) == lengths

    rows = [empty for _ in lengths]
    batches = [rows, Ragged(empty, ops.asarray1i(lengths))]
    batches += [ops.list2padded(rows)] if rows else []
    projections = MultiHeadAttention(16, 4), TransformerEncoder(16, 1, 4)
    own = chain(with_array(Linear(64, 16)), layer, with_array(Linear(16, 32)))
    own.initialize()
    assert own.predict(Ragged(empty, ops.asarray1i(lengths))).dataXd.shape == (0, 16)
    for model in projections:
        model.initialize(X=rows)
        for batch in batches:
            out, backprop = model.begin_update(batch)
            for result in (out, backprop(out)):
                assert type(result) is type(batch)
                parts = result if isinstance(result, list) else [result.data]
                given = batch if isinstance(batch, list) else [batch.data]
                assert [part.shape for part in parts] == [part.shape for part in given]


def test_encoder_gradient_by_finite_differences(ops, rng):
    data = rng.standard_normal((sum(LENGTHS), 16), dtype=np.float32)
    weight = rng.standard_normal(data.shape, dtype=np.float32)
    encoder = TransformerEncoder(16, 2, 4, num_heads_kv=2, causal=True)
    encoder.initialize(X=ragged(ops, data))
    _, backprop = encoder.begin_update(ragged(ops, data))
    gradient = to_host(backprop(ragged(ops, weight)).data)
    slope = np.linalg.norm(gradient)
    direction = gradient / slope

    def loss(step: float) -> float:
        out = encoder.predict(ragged(ops, data + np.float32(step) * direction))
        return float((to_host(out.data).astype(np.float64) * weight).sum())

    measured = (loss(1e-2) - loss(-1e-2)) / 2e-2
    np.testing.assert_allclose(slope, measured, rtol=2e-3)  # measured 1.3e-4
    grads = [
        node.get_grad(name)
        for node in encoder.walk()
        for name in node.param_names
        if node.has_grad(name)
    ]
    assert len(grads) == 2 * 12 + 2
    assert all(float(abs(grad).max()) > 0 for grad in grads)


def test_sequences_do_not_mix_and_order_counts(ops, rng):
    rows = [ops.asarray2f(rng.standard_normal((n, 16), dtype=np.float32)) for n in (6, 1, 30)]
    encoder = TransformerEncoder(16, 1, 2)
    encoder.initialize(X=rows)
    together = encoder.predict(rows)
    for alone, got in zip(rows, together, strict=True):
        want = encoder.predict([alone])[0]
        np.testing.assert_allclose(to_host(got), to_host(want), rtol=1e-4, atol=1e-5)
    backwards = encoder.predict([rows[0][::-1].copy()])[0][::-1]
    assert float(abs(backwards - together[0]).max()) > 1e-3


def test_a_batch_without_tokens(ops):
    layer = FlashAttention(HEADS, DIM)
    nothing = Ragged(ops.alloc2f(0, 3 * HEADS * DIM), ops.asarray1i([0, 0]))
    out, backprop = layer.begin_update(nothing)
    assert len(out.data) == len(backprop(out).data) == 0
    np.testing.assert_array_equal(to_host(out.lengths), [0, 0])


def test_bytes_and_back(ops, rng):
    rows = [ops.asarray2f(rng.standard_normal((n, 16), dtype=np.float32)) for n in (4, 7)]
    encoder = TransformerEncoder(16, 2, 2, window=(2, None), attention_dropout=0.1)
    encoder.initialize(X=rows)
    again = TransformerEncoder(16, 2, 2).from_bytes(encoder.to_bytes())
    for one, other in zip(encoder.predict(rows), again.predict(rows), strict=True):
        np.testing.assert_array_equal(to_host(one), to_host(other))
    assert again.to_bytes() == encoder.to_bytes()


def test_dropout_follows_thinc(rng):
    data = ragged(NumpyOps(), rng.standard_normal((sum(LENGTHS), 3 * HEADS * DIM)))
    layer = FlashAttention(HEADS, DIM, dropout=0.0)
    plain = layer.predict(data).data
    np.testing.assert_array_equal(layer(data, is_train=True)[0].data, plain)
    set_dropout_rate(layer, 0.5)
    np.testing.assert_array_equal(layer.predict(data).data, plain)
    first, second = [], []
    for outs in (first, second):
        fix_random_seed(7)
        outs += [layer(data, is_train=True)[0].data for _ in range(2)]
    np.testing.assert_array_equal(first, second)
    assert np.any(first[0] != first[1])
    assert np.any(first[0] != plain)
    without = FlashAttention(HEADS, DIM)
    set_dropout_rate(without, 0.5)
    np.testing.assert_array_equal(without(data, is_train=True)[0].data, plain)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 3, "head_dim": 8, "num_heads_kv": 2}, "multiple of num_heads_kv"),
        ({"num_heads": 0, "head_dim": 8}, "all positive"),
        ({"num_heads": 2, "head_dim": 7}, "head_dim must be even"),
    ],
)
def test_wrong_heads(arguments, message):
    with pytest.raises(ValueError, match=message):
        FlashAttention(**arguments)


def test_wrong_width_and_depth():
    with pytest.raises(ValueError, match="width=10, num_heads=4"):
        MultiHeadAttention(10, 4)
    with pytest.raises(ValueError, match="depth"):
        TransformerEncoder(8, 0, 4)


@pytest.mark.parametrize("make", [MultiHeadAttention, partial(TransformerEncoder, depth=1)])
def test_wrong_sequences(rng, make):
    layer = make(width=8, num_heads=2)
    rows = rng.standard_normal((5, 8)).astype(np.float32)
    layer.initialize(X=[rows, rows[:0]])
    assert layer.predict([rows])[0].shape == (5, 8)
    lengths = np.array([5], np.int32)
    narrow, wide = rows[:, :7], rows.astype(np.float64)
    for wrong in ([narrow], Ragged(narrow, lengths), [rows, wide], rows, [[1.0]], [rows[0]]):
        with pytest.raises(DataValidationError, match=r"arrays \(length, 8\)"):
            layer.predict(wrong)
        with pytest.raises(DataValidationError, match=r"arrays \(length, 8\)"):
            make(width=8, num_heads=2).initialize(X=wrong)


def test_wrong_data(rng):
    layer = FlashAttention(HEADS, DIM)
    right = rng.standard_normal((sum(LENGTHS), 3 * HEADS * DIM)).astype(np.float32)
    with pytest.raises(DataValidationError, match="96 wide"):
        layer.predict(Ragged(right[:, :-1], np.array(LENGTHS, np.int32)))
    with pytest.raises(DataValidationError, match="cu_seqlens"):
        layer.predict(Ragged(right, np.array([5, 100], np.int32)))
    with pytest.raises(DataValidationError, match="dtype"):
        layer.predict(Ragged(right.astype(np.int64), np.array(LENGTHS, np.int32)))
    _, backprop = layer.begin_update(Ragged(right, np.array(LENGTHS, np.int32)))
    with pytest.raises(DataValidationError, match="32 wide"):
        backprop(Ragged(right, np.array(LENGTHS, np.int32)))
    narrow = right[:, : HEADS * DIM]
    for wrong in (narrow.astype(np.int64), narrow[:-1]):
        with pytest.raises(DataValidationError, match="dout"):
            backprop(Ragged(wrong, np.array(LENGTHS, np.int32)))
    for other in (right, [right]):
        with pytest.raises(DataValidationError, match="a Ragged of rows 96 wide"):
            layer.predict(other)


@pytest.mark.parametrize("name", ["FlashAttention", "MultiHeadAttention", "TransformerEncoder"])
def test_thinc_finds_it_by_name(name):
    assert registry.layers.get(f"cupyflash.{name}.v1").__name__ == name


# --- inside spaCy -------------------------------------------------------------------------------

TRAINING = [
    ("the long run ends", "DET ADJ NOUN VERB"),
    ("they run the race", "PRON VERB DET NOUN"),
    ("the race starts", "DET NOUN VERB"),
    ("they race", "PRON VERB"),
]
ENCODER = {
    "@architectures": "cupyflash.TransformerEncoder.v1",
    "width": 32,
    "depth": 1,
    "num_heads": 4,
    "window": [4, None],
    "attention_dropout": 0.1,
}
EMBED = {
    "@architectures": "spacy.MultiHashEmbed.v2",
    "width": 32,
    "attrs": ["NORM"],
    "rows": [200],
    "include_static_vectors": False,
}
TOK2VEC = {"@architectures": "spacy.Tok2Vec.v2", "embed": EMBED, "encode": ENCODER}


def test_spacy_trains_and_reloads_a_tagger(tmp_path):
    spacy = pytest.importorskip("spacy", reason="spaCy is not installed")
    from spacy.training import Example

    fix_random_seed(0)
    nlp = spacy.blank("en")
    nlp.add_pipe(
        "tagger", config={"model": {"@architectures": "spacy.Tagger.v2", "tok2vec": TOK2VEC}}
    )
    examples = [
        Example.from_dict(nlp.make_doc(text), {"tags": tags.split()}) for text, tags in TRAINING
    ]
    optimizer = nlp.initialize(lambda: examples)
    for _ in range(60):
        nlp.update(examples, sgd=optimizer, drop=0.1)
    nlp.to_disk(tmp_path)
    again = spacy.load(tmp_path)
    for text, tags in TRAINING:  # "run" and "race" are told apart by what stands beside them
        assert [token.tag_ for token in nlp(text)] == tags.split()
        assert [token.tag_ for token in again(text)] == tags.split()
    assert len(nlp("")) == 0


def test_spacy_says_what_is_wrong_in_a_config():
    spacy = pytest.importorskip("spacy", reason="spaCy is not installed")
    from confection import ConfigValidationError

    wrong = TOK2VEC | {"encode": ENCODER | {"num_heads": "four"}}
    model = {"@architectures": "spacy.Tagger.v2", "tok2vec": wrong}
    with pytest.raises(ConfigValidationError, match="num_heads"):
        spacy.blank("en").add_pipe("tagger", config={"model": model})
