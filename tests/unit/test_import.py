"""``import cupyflash`` is light: no framework comes with it, and it takes no time to speak of."""

from __future__ import annotations

import subprocess
import sys

HEAVY = (
    *("cupy", "cuda", "matplotlib", "tqdm", "onnx", "onnxruntime"),
    *("chainer", "jax", "jaxlib", "numba", "spacy", "thinc", "torch"),
)
ALLOWED_SHARE = 2.5  # measured 0.7 to 1
TRIES = 5


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_import_pulls_in_nothing_heavy() -> None:
    loaded = run("import sys, cupyflash, cupyflash.compat; print(*sys.modules)").split()
    assert not set(HEAVY) & set(loaded)


def test_import_is_fast() -> None:
    """Processor time in terms of NumPy's own, as machines differ; the best of several tries.

    That of ml_dtypes is not ours: version 0.7 takes five times as long as NumPy.
    """
    code = (
        "from time import process_time as now; start = now(); import numpy; middle = now(); "
        "import ml_dtypes; ours = now(); import cupyflash; print(middle - start, now() - ours)"
    )
    tries = [map(float, run(code).split()) for _ in range(TRIES)]
    numpys, ours = map(min, zip(*tries, strict=True))
    assert ours < ALLOWED_SHARE * numpys


def test_public_names_exist_and_are_documented() -> None:
    code = (
        "import cupyflash; "
        "print(*(n for n in cupyflash.__all__ if not getattr(cupyflash, n).__doc__))"
    )
    assert run(code) == ""
