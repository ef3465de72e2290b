"""``bench --features``, with the NumPy engine for a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupyflash.bench import features
from cupyflash.bench.features import FEATURES, FeatureResult, header, line, measure, to_json
from cupyflash.bench.workloads import DIRECTIONS
from tests.bench_fakes import SMALL, fake_times, make_inputs


@pytest.fixture(autouse=True)
def numbers(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Random numbers on the host."""
    draw = lambda shape, dtype: rng.standard_normal(shape).astype(dtype)  # noqa: E731
    monkeypatch.setattr(features, "normal", draw)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_feature_takes_turns_with_the_plain_call(rng: Any, direction: str) -> None:
    turns: list[list[str]] = []

    def milliseconds(works: Any) -> dict[str, float]:
        turns.append(list(works))
        return fake_times(works)

    inputs = make_inputs(SMALL, rng)
    results = measure(SMALL, direction, inputs, None, False, milliseconds)
    assert [each.error for each in results] == [None] * len(FEATURES)
    assert turns == [["plain", each.name] for each in FEATURES]
    assert all(each.slow_down == 2.0 for each in results)  # the second of two, as fake times go
    assert all(each.flex_milliseconds is None for each in results)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda each: each.name)
def test_each_feature_changes_the_result(rng: Any, feature: Any) -> None:
    workload = replace(SMALL, seqlen_q=700, seqlen_k=700, batch=2)
    inputs = make_inputs(workload, rng)
    calls = ({}, False), (feature.options(workload, inputs), feature.varlen)
    outs = [features._ours(*call, workload, inputs, None)["forward"]()() for call in calls]
    same = np.array_equal(outs[0].ravel(), outs[1].ravel())
    assert same == feature.varlen  # which is the same sequences, packed


def test_a_row_that_fails_leaves_the_others(rng: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> dict[str, Any]:
        raise MemoryError("no room\nfor this bias")

    rows = (features.Feature("broken", broken), FEATURES[0])
    monkeypatch.setattr(features, "FEATURES", rows)
    first, second = measure(SMALL, "forward", make_inputs(SMALL, rng), None, False, fake_times)
    assert first.error == "MemoryError: no room\nfor this bias" and first.slow_down is None
    assert second.error is None and second.slow_down is not None
    assert line(first) == "| broken | forward | MemoryError: no room for this bias |"


def test_the_table_and_its_json() -> None:
    result = FeatureResult("name", "forward", "softcap", 3.0, 2.0, 4.0)
    assert line(result) == "| softcap | forward | 3.000 | 1.500 | 4.000 |"
    assert header().splitlines()[0].count("|") == line(result).count("|")
    assert to_json([result], {"device": "x"}) == {
        "machine": {"device": "x"},
        "results": [
            {
                "workload": "name",
                "direction": "forward",
                "feature": "softcap",
                "milliseconds": 3.0,
                "plain_milliseconds": 2.0,
                "flex_milliseconds": 4.0,
                "flex_error": None,
                "error": None,
                "slow_down": 1.5,
            }
        ],
    }
