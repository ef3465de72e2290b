"""tests/cuda/test_wgmma_scores.py on the emulated engine."""

import os
from collections.abc import Iterator

import pytest

from tests.cuda import test_wgmma_scores as real
from tests.cuda.test_wgmma_scores import (  # noqa: F401
    test_keys_that_a_band_hides_may_hold_anything,
    test_keys_that_a_bias_hides_may_hold_anything,
    test_nothing_is_done_again_without_nan,
    test_one_nan_is_enough,
)

# CI has seconds for these; CUPYFLASH_EMULATE=all runs all of them.
CHOSEN = (
    "full",
    "of sequences",
    "padded rows",
    "causal",
    "window",
    "window of many tiles",
    "wide",
    "hidden sinks",
    "hidden tiles",
    "large",
    "alibi narrow",
    "bias alibi",
)
everything = os.environ.get("CUPYFLASH_EMULATE") == "all"


@pytest.fixture(autouse=True)
def launched(kernel_names: list[str]) -> Iterator[list[str]]:
    """Names of the kernels that run; the first is wgmma's own."""
    yield kernel_names
    assert kernel_names[0] == "cupyflash_forward_wgmma"


@pytest.mark.parametrize("case", real.CASES if everything else CHOSEN)
def test_scores(
    rng: object, monkeypatch: pytest.MonkeyPatch, launched: list[str], case: str
) -> None:
    real.test_scores(rng, monkeypatch, case)
    assert ("cupyflash_forward_again_mma" in launched) == ("alibi" not in case.split()[:1])
