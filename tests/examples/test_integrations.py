"""The examples inside other frameworks, and on models that packages ship."""

from __future__ import annotations

import re

import pytest

from tests.examples.conftest import ROOT

EXAMPLES = ROOT / "examples"


def test_spacy_tagger(run):
    pytest.importorskip("spacy", reason="spaCy is not installed")
    output = run(EXAMPLES / "spacy_tagger.py", "--device", "cpu", "--steps", 50)
    near, far = map(int, re.search(r"cupyflash\) +(\d+)% +(\d+)%", output).groups())
    assert min(near, far) >= 95  # spaCy's convolutions guess the far ones
