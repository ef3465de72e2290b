"""tests/cuda/test_mma_turns.py on the emulated engine."""

import os

import pytest

from tests.cuda import test_mma_turns as real
from tests.cuda.test_mma_turns import (  # noqa: F401
    test_values_that_nobody_sees_may_hold_anything,
)

# CI has seconds for these; CUPYFLASH_EMULATE=all runs all of them.
CHOSEN = ("one tile", "causal", "window", "varlen", "softcap, alibi")
everything = os.environ.get("CUPYFLASH_EMULATE") == "all"


@pytest.mark.parametrize("case", real.CASES if everything else CHOSEN)
def test_turns(rng: object, case: str) -> None:
    real.test_turns(rng, case)
