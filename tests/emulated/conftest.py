"""Every test in this folder runs the kernels of the GPU engines on the host: see tests/emulator."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.conftest import pytest_pyfunc_call  # noqa: F401  skips dtypes not served
from tests.emulator.build import reason_to_skip
from tests.emulator.device import ENGINES, Launcher, emulated

# The seconds that CI has for these go to what kernels do by themselves: each of these names a test,
# with some of its parameters. CUPYFLASH_EMULATE=all runs every shared test.
CHOSEN = (
    r"keys_that_nobody_sees_may_hold_anything\[.*-(mask|bias|block_mask)-",
    r"tokens_past_the_last_entry_may_hold_anything",
    r"feature_alone\[.*-(plain|causal|varlen|dropout|gqa|sinks|score_mod)-(bfloat16|float32)\]",
    r"two_features\[.*-(causal-bias|window-varlen|mask-dropout|bias-gqa|softcap-alibi)\]",
    r"what_some_queries_see.*\[(mma|wgmma)-\{'window': \(90",
    r"rows_that_see_no_key",
    r"tiles_that_nothing_meets",
    r"gradients_of_a_whole_bias",
    r"what_an_entry_holds.*\[mma-",
    r"an_axis_of_length_1_is_also_whole\[mma-",
    r"a_scale_of_nothing",
    r"float8_feature_alone\[.*-(plain|varlen)\]",
    r"every_number_is_read_exactly",
    r"float8_rounding_of_a_feature\[wgmma-causal\]",
    r"one_key_a_query\[wgmma\]",
    r"out_amid_other_bytes\[wgmma-(narrow|long)-(columns|heads first|rows of more\]|reversed rows)",
    r"tiles_that_fetch_ahead\[wgmma-",
    r"grouped_heads_are_repeated_heads\[.*float16\]",
    r"every_shape_of_a_block\[mma-\((1, \(8, 1\)|5, )",
    r"deterministic_gradients\[wgmma-(full|window|wide, window|wide values)\]",
    r"changes_of_scores\[mma-(window|alibi by entry)-",
    r"every_shape_of_a_block_of_float8\[mma-\((1, \(4, 1\)|5, )",
    r"every_number_is_rounded_to_the_nearest\[mma-7.0-",
    r"calls\[simt-step, paged-",
    r"a_long_context\[mma-(16|64)-",
    r"an_entry_alone_in_another_cache_gives_the_same_bits\[mma-1\]",
    r"what_does_not_fit_is_reported\[mma-.*-4\]",
)


NEEDS_A_GPU = ("test_saved_state_holds_inputs_options_and_statistics",)  # it reads CuPy's pointers


def _is_chosen(item: Any) -> bool:
    if not item.path.name.startswith("test_shared_"):
        return True
    if "engine" not in item.fixturenames or item.originalname in NEEDS_A_GPU:
        return False
    everything = os.environ.get("CUPYFLASH_EMULATE") == "all"
    return everything or any(re.match(f"test_{name}", item.name) for name in CHOSEN)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep the chosen ones of the shared tests, and the folder's own."""
    here, reason = Path(__file__).parent, reason_to_skip()
    mine = [item for item in items if here in item.path.parents]
    left_out = {item for item in mine if not _is_chosen(item)}
    if reason:
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=reason))
    if left_out:
        config.hook.pytest_deselected(items=sorted(left_out, key=lambda item: item.nodeid))
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", params=ENGINES)
def engine(request: Any) -> str:
    """The emulated engine under test, in place of tests/conftest.py's."""
    return request.param


@pytest.fixture(autouse=True)
def _on_the_host() -> Iterator[None]:
    with emulated():
        yield


@pytest.fixture
def kernel_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that run, as they do."""
    names: list[str] = []
    run = Launcher.__call__

    def spy(self: Launcher, blocks: int, *values: float) -> None:
        names.append(self._name)
        run(self, blocks, *values)

    monkeypatch.setattr(Launcher, "__call__", spy)
    return names
