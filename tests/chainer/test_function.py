"""flash_attention under Chainer's FunctionTestCase: values, first and second derivatives."""

from __future__ import annotations

import numpy as np
from chainer import testing

from tests.chainer.function_cases import FEATURES, FlashAttentionCase

CASES = [{"feature": feature} for feature in FEATURES]
CASES += [{"layout": "bhsd", "feature": feature} for feature in ("causal", "bias", "gqa")]
CASES += [{"dtype": dtype, "feature": "causal"} for dtype in (np.float16, np.float32)]


@testing.parameterize(*CASES)
@testing.inject_backend_tests(None, [{}])
class TestFlashAttention(FlashAttentionCase, testing.FunctionTestCase):
    pass
