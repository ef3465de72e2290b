"""The pages in docs/ do what they say."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import cupyflash
from tests.unit.test_import import run

DOCS = Path(cupyflash.__file__).parents[1] / "docs"


@pytest.mark.parametrize("name", ["jax", "thinc"])
def test_python_of_a_page(name):
    pytest.importorskip(name)
    code = re.search(r"```python\n(.*?)```", (DOCS / f"{name}.md").read_text(), re.DOTALL)[1]
    printed = re.search(r"print\(.*\)  # (.*)\n", code)[1]
    assert run(code) == printed


def test_spacy_config_of_the_page():
    spacy = pytest.importorskip("spacy")
    section = re.search(r"```ini\n(.*?)```", (DOCS / "thinc.md").read_text(), re.DOTALL)[1]
    head = '[components]\n\n[components.tok2vec]\nfactory = "tok2vec"\n\n'
    config = spacy.util.load_config_from_str(head + section)
    model = config["components"]["tok2vec"]["model"]
    nlp = spacy.blank("en")
    nlp.add_pipe("tok2vec", config={"model": model})
    nlp.initialize()
    assert nlp("Short ones do not pay.").tensor.shape == (6, 96)


OPTIONS = {
    "plain": ({}, {}),
    "causal": ({"is_causal": True}, {"causal": "top-left"}),
    "scale": ({"scale": 0.3}, {"softmax_scale": 0.3}),
    "window": (
        {"local_window_size": (3, 2), "is_causal": True},
        {"window": (3, 2), "causal": "top-left"},
    ),
}


@pytest.mark.parametrize("case", [*OPTIONS, "bias", "mask", "lengths", "equal lengths window"])
def test_arguments_of_jax(rng, case):
    """Each line of the table of `jax.nn.dot_product_attention`."""
    jax = pytest.importorskip("jax")
    from cupyflash.jax import flash_attention

    keys = 9 if case == "equal lengths window" else 13
    shapes = (2, 9, 4, 16), (2, keys, 2, 16), (2, keys, 2, 16)
    q, k, v = (jax.numpy.asarray(rng.standard_normal(shape, "float32")) for shape in shapes)
    bias = jax.numpy.asarray(rng.standard_normal((4, 9, 13), "float32"))
    mask = jax.numpy.asarray(rng.random((2, 1, 9, 13)) < 0.8).at[..., 0].set(True)
    seen = jax.numpy.asarray([13, 6])
    real = (jax.numpy.arange(13) < seen[:, None])[:, None, None]
    arrays = {
        "bias": ({"bias": bias[None]}, {"bias": bias}),
        "mask": ({"mask": mask}, {"mask": mask}),
        "lengths": ({"key_value_seq_lengths": seen}, {"mask": real}),
        "equal lengths window": ({"local_window_size": (3, 2)}, {"window": (3, 2)}),
    }
    theirs, ours = (OPTIONS | arrays)[case]
    with jax.default_matmul_precision("float32"):  # a GPU multiplies in TF32 if not told otherwise
        want = jax.nn.dot_product_attention(q, k, v, **theirs)
    np.testing.assert_allclose(flash_attention(q, k, v, **ours), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["jax", "thinc"])
def test_a_framework_that_is_missing_is_named(name):
    code = f"""
import sys
sys.modules["{name}"] = None
try:
    import cupyflash.{name}
except ModuleNotFoundError as error:
    print(error.name, error)
"""
    said = run(code)
    assert said.startswith(f"{name} ") and said.endswith(f": pip install 'cupyflash[{name}]'")
