"""``import cupyflash`` is light: no framework comes with it, and it takes no time to speak of."""

from __future__ import annotations

import subprocess
import sys

HEAVY = (
    *("cupy", "cuda", "matplotlib", "tqdm", "onnx", "onnxruntime"),
    *("chainer", "jax", "jaxlib", "numba", "spacy", "thinc", "torch"),
)
ALLOWED_SECONDS = 0.2
TRIES = 5


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_import_pulls_in_nothing_heavy() -> None:
    loaded = run("import sys, cupyflash, cupyflash.compat; print(*sys.modules)").split()
    assert not set(HEAVY) & set(loaded)


def test_import_is_fast() -> None:
    """Processor time beyond NumPy's own; the best of several tries, as other work only adds."""
    code = (
        "import numpy, time; start = time.process_time(); import cupyflash; "
        "print(time.process_time() - start)"
    )
    seconds = min(float(run(code)) for _ in range(TRIES))
    assert seconds < ALLOWED_SECONDS


def test_public_names_exist_and_are_documented() -> None:
    code = (
        "import cupyflash; "
        "print(*(n for n in cupyflash.__all__ if not getattr(cupyflash, n).__doc__))"
    )
    assert run(code) == ""
