"""The examples inside other frameworks, and on models that packages ship."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

from tests.examples.conftest import ROOT

EXAMPLES = ROOT / "examples"
# Not importorskip: beside NumPy 2 Chainer cannot be imported alone.
needs_chainer = pytest.mark.skipif(find_spec("chainer") is None, reason="no Chainer")


def test_spacy_tagger(run):
    pytest.importorskip("spacy", reason="spaCy is not installed")
    output = run(EXAMPLES / "spacy_tagger.py", "--device", "cpu", "--steps", 50)
    near, far = map(int, re.search(r"cupyflash\) +(\d+)% +(\d+)%", output).groups())
    assert min(near, far) >= 95  # spaCy's convolutions guess the far ones


@needs_chainer
def test_gpt_chainer(run, tmp_path):
    output = run(EXAMPLES / "gpt_chainer.py", "--device", "cpu", "--steps", 12, "--context", 32)
    flash, dense = (
        [float(x) for x in re.findall(r"\d\.\d+", line)]
        for line in re.findall(r"^(?:flash|dense): loss (.*) in ", output, re.MULTILINE)
    )
    assert flash[-1] < flash[0] - 0.5
    assert flash[-1] == pytest.approx(dense[-1], abs=1e-3)
    assert float(re.search(r"at any step: (\S+)", output)[1]) < 1e-3
    assert "ROMEO:\n" in output
    pytest.importorskip("matplotlib")
    assert (tmp_path / "gpt_chainer.png").stat().st_size > 10_000


@needs_chainer
def test_vit_chainer(run, tmp_path):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    output = run(EXAMPLES / "vit_chainer.py", "--device", "cpu", "--epochs", 2)
    assert float(re.search(r"unseen images: (\S+),", output)[1]) > 0.3  # 0.1 is a guess
    assert not list(tmp_path.iterdir())  # Chainer would leave a folder `result`
