"""tests/unit/test_score_mod.py on the GPU engines."""

from tests.unit.test_score_mod import *  # noqa: F403
