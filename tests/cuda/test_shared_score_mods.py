"""tests/unit/test_score_mods.py on the GPU engines."""

from tests.unit.test_score_mods import *  # noqa: F403
