"""Plans and parameters of calls whose scores masks, bias and dropout change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyflash import BlockMask, _validate
from cupyflash._cuda import arguments
from cupyflash._cuda.device import Device
from cupyflash._cuda.plan import plan_backward, plan_forward
from cupyflash._cuda.plan_mma_backward import plan_backward as plan_mma_backward
from cupyflash._options import Options
from cupyflash._problem import Problem

HOPPER = Device.known("sm_90a")


def bound(*, seqlen_q: int = 300, **options: Any) -> _validate.Call:
    query = np.zeros((2, seqlen_q, 4, 64), np.float32)
    key = np.zeros((2, 500, 2, 64), np.float32)
    return _validate.bind(query, key, key, Options(**options))


def booleans(*shape: int) -> np.ndarray:
    return np.ones(shape, bool)


@pytest.mark.parametrize(
    ("options", "masks", "shape"),
    [
        ({}, 0, ()),
        ({"bias": np.zeros((300, 500), np.float32)}, 0, ()),
        ({"mask": booleans(2, 1, 1, 500)}, 1, (2, 1, 1, 500)),
        ({"mask": booleans(300, 1)}, 1, (1, 1, 300, 1)),
        ({"block_mask": BlockMask(booleans(1, 4, 10, 1), (30, 500))}, 0, (1, 4, 300, 1)),
        (
            {
                "mask": booleans(2, 1, 1, 500),
                "block_mask": BlockMask(booleans(1, 4, 1, 1), (300, 500), booleans(300, 1)),
            },
            2,
            (2, 4, 300, 500),
        ),
    ],
)
def test_masks_together_have_the_axes_that_one_of_them_has(
    options: dict[str, Any], masks: int, shape: tuple[int, ...]
) -> None:
    problem = bound(**options).problem
    assert (problem.masks, problem.mask_shape) == (masks, shape)


@pytest.mark.parametrize("shape", [(2, 1, 1, 500), (1, 4, 300, 500)])
def test_masks_add_maps_of_the_kernels_own_tiles(shape: tuple[int, ...]) -> None:
    problem = bound(mask=booleans(*shape)).problem
    forward, backward = plan_forward(problem, HOPPER), plan_backward(problem, HOPPER)
    configs = (forward.config, backward.config_dq, backward.config_dkdv)
    maps = (*forward.tile_maps, *backward.tile_maps)
    names = [tile_map.pointer for tile_map in maps]
    assert names == ["visibility", "visibility", "key_visibility"]
    for config, tile_map in zip(configs, maps, strict=True):
        rows, cols = -(-shape[2] // config.block_m), -(-shape[3] // config.block_n)
        assert tile_map.size == shape[0] * shape[1] * rows * cols
        assert tile_map.launch.blocks * tile_map.launch.threads >= 32 * tile_map.size
    assert forward.launches[0].entry in forward.stub
    # They come first, as the others read them.
    assert [launch.entry for launch in backward.launches[:2]] == names_of(names[1:])


def names_of(pointers: list[str]) -> list[str]:
    return [f"cupyflash_{pointer}" for pointer in pointers]


def test_varlen_masks_are_tested_element_by_element() -> None:
    tokens, ends = np.zeros((9, 2, 8), np.float32), np.array([0, 4, 9], np.int32)
    problem = _validate.bind(
        tokens, tokens, tokens, Options(mask=booleans(5, 5)),
        sequences=_validate.Sequences(ends, ends),
    ).problem  # fmt: skip
    config = plan_forward(problem, HOPPER).config
    assert (config.masks, config.visibility) == (1, False)
    assert not plan_backward(problem, HOPPER).tile_maps


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 1, 1, 500), (1, 4, 300, 500)])
def test_each_tile_of_the_bias_has_a_block(shape: tuple[int, ...]) -> None:
    plan = plan_backward(bound(bias=np.zeros(shape, np.float32)).problem, HOPPER)
    assert plan.grad_bias is not None
    rows = -(-shape[2] // plan.config_dq.block_m)
    cols = -(-shape[3] // plan.config_dq.block_n)
    assert plan.grad_bias.blocks == shape[0] * shape[1] * rows * cols


@pytest.mark.parametrize(
    ("shape", "tiles"),
    [
        ((1, 4, 999, 999), 4 * 16 * 8),
        ((2, 1, 999, 999), 2 * 16 * 8),
        ((2, 4, 999, 999), 0),
        ((1, 4, 1, 999), 0),
    ],
)
def test_mma_sums_a_whole_shared_bias_in_tiles(shape: tuple[int, ...], tiles: int) -> None:
    extras = frozenset({"bias"})
    problem = Problem(
        "float16", 2, 999, 999, 4, 2, 128, 128, 0.1, extras=extras, bias_dtype="float16",
        bias_shape=shape,
    )  # fmt: skip
    plan = plan_mma_backward(problem, HOPPER)
    assert plan.bias_sums == tiles * plan.config.block_m * plan.config.block_n
    assert (plan.convert_bias is None) == (tiles == 0)
    assert problem.grad_bias_dtype("mma") == ("float32" if 1 in shape[2:] else "float16")
    assert plan.zeroed_bias == (1 in shape[2:])


@pytest.mark.parametrize("seqlens", [(1, 999), (999, 1), (1, 1)])
def test_mma_sums_a_bias_of_one_row_or_column_as_a_broadcast_one(seqlens: tuple[int, int]) -> None:
    problem = Problem(
        "float16", 2, *seqlens, 4, 2, 128, 128, 0.1, extras=frozenset({"bias"}),
        bias_dtype="float16", bias_shape=(1, 4, *seqlens),
    )  # fmt: skip
    plan = plan_mma_backward(problem, HOPPER)
    assert plan.convert_bias is None and plan.bias_sums == 0 and plan.zeroed_bias
    assert problem.grad_bias_dtype("mma") == "float32"


@pytest.mark.parametrize("change", [{"dropout_p": 0.5}, {"mask": booleans(300, 500)}])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_changed_scores_have_registers_left(dtype: str, change: dict[str, Any]) -> None:
    def scores(problem: Problem) -> int:
        tiling = plan_forward(problem, HOPPER).tiling
        return tiling.block_m * tiling.block_n // tiling.warps

    for head_dim in range(32, 257, 32):
        query = np.zeros((2, 300, 4, head_dim), dtype)
        key = np.zeros((2, 500, 2, head_dim), dtype)
        plain, changed = (
            _validate.bind(query, key, key, Options(**options)).problem for options in ({}, change)
        )
        assert scores(changed) <= min(scores(plain), 32 * 32)


def test_strides_of_arrays_that_broadcast() -> None:
    bias = np.zeros((2, 4, 300, 1), np.float32)[:, :, ::-2]
    values = arguments.ScoreLayout.of(bias).values()  # type: ignore[union-attr]
    assert values == (1200, 300, -2, 0, 150, 2**31 - 1)
    assert arguments.ScoreLayout.of(None) is None


@pytest.mark.parametrize(
    ("dropout_p", "threshold", "factor"),
    [(0.0, 0, 1.0), (0.5, 2**31, 2.0), (2.0**-40, 0, 1.0), (1 - 2.0**-40, 2**32 - 1, 0.0)],
)
def test_dropout_keeps_words_from_a_threshold_on(
    dropout_p: float, threshold: int, factor: float
) -> None:
    values = arguments.attention_values(bound(dropout_p=dropout_p).problem)
    assert values["dropout_threshold"] == threshold
    assert values["keep_factor"] == pytest.approx(factor)


def test_calls_without_changes_set_no_more_pointers() -> None:
    from cupyflash._cuda.params import BACKWARD_POINTERS, FORWARD_POINTERS, pointers_of

    sinks = np.zeros(4, np.float32)
    assert len(pointers_of(FORWARD_POINTERS, bound(sinks=sinks).problem)) == 10
    for change in ({"dropout_p": 0.5}, {"mask": booleans(300, 500)}):
        problem = bound(**change).problem
        assert pointers_of(BACKWARD_POINTERS, problem) == BACKWARD_POINTERS


def test_fields_of_several_pointers_take_as_many_values() -> None:
    names = ("seed", "score_params", "grad_bias")
    values = arguments.values_of(names, {"seed": 7, "score_params": (1, 2)})
    assert values == [7, 1, 2, 0, 0, 0, 0, 0, 0, 0]
