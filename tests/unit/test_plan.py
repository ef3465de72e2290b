"""Planning of the simt engine: pure functions of a problem and a device."""

from __future__ import annotations

import re
from itertools import product

import pytest

from cupyflash._cuda import arguments, params, tiles_simt
from cupyflash._cuda.config import BackwardConfig, ForwardConfig
from cupyflash._cuda.device import Device
from cupyflash._cuda.plan import plan_backward, plan_forward
from cupyflash._cuda.source import kernels_root
from cupyflash._problem import Problem
from cupyflash.errors import UnsupportedError
from cupyflash.tiling import Tiling

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
DTYPES = ("float16", "bfloat16", "float32", "float64")
HOPPER = Device.known("sm_90a")


def problem_of(dtype: str = "float32", d: int = 64, dv: int = 64, **options: object) -> Problem:
    shape = {"batch": 2, "seqlen_q": 300, "seqlen_k": 500, "num_heads": 4, "num_heads_kv": 2}
    settings = {**shape, "head_dim": d, "head_dim_v": dv, "softmax_scale": 0.125, **options}
    return Problem(dtype, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("arch", "dtype"), list(product(ARCHS, DTYPES)))
def test_every_head_dim_fits_every_device(arch: str, dtype: str) -> None:
    device = Device.known(arch)
    limit = device.shared_memory_per_block_optin
    for d in range(1, 257):
        for dv in {d, 1, 256, 257 - d}:
            problem = problem_of(dtype, d, dv)
            for plan in (plan_forward(problem, device), plan_backward(problem, device)):
                for launch in plan.launches:
                    assert launch.shared_memory <= limit
                    assert launch.threads <= 256


def test_every_line_of_the_tile_table_is_some_devices_first_choice() -> None:
    """A line that no device ever takes would be dead."""
    limits = {Device.known(arch).shared_memory_per_block_optin for arch in ARCHS}
    for (itemsize, head_dim), tiles in tiles_simt.FORWARD_TILES.items():
        dtype = "float64" if itemsize == 8 else "float32"
        plans = [
            plan_forward(problem_of(dtype, head_dim, head_dim), Device.known(arch)).tiling
            for arch in ARCHS
        ]
        taken = {(plan.block_m, plan.block_n, plan.warps) for plan in plans}
        assert taken == {(tile.resident, tile.streamed, tile.warps) for tile in tiles}, head_dim
        assert len(taken) <= len(limits)


def test_plans_are_values() -> None:
    first, second = plan_forward(problem_of(), HOPPER), plan_forward(problem_of(), HOPPER)
    assert first == second
    assert hash(first) == hash(second)
    assert "block_m=128" in repr(first)


def test_the_stub_names_every_field_of_the_configuration() -> None:
    plan = plan_forward(problem_of(window_right=0), HOPPER)
    for name in ForwardConfig.__dataclass_fields__:
        assert f".{name} = " in plan.stub
    assert ".dtype = DataType::float32" in plan.stub
    assert ".window = true" in plan.stub


@pytest.mark.parametrize("window", [{"window_left": 0}, {"window_right": 0}, {"window_right": 9}])
def test_any_window_bound_compiles_the_masked_kernel(window: dict[str, int]) -> None:
    assert plan_forward(problem_of(**window), HOPPER).config.window
    assert not plan_forward(problem_of(), HOPPER).config.window


@pytest.mark.parametrize(
    ("dtype", "vector_bytes", "d", "dv", "width"),
    [
        ("float32", 16, 64, 64, 4),
        ("float32", 8, 64, 64, 2),
        ("float32", 16, 30, 64, 2),
        ("float32", 16, 64, 33, 1),
        ("float16", 16, 64, 64, 8),
        ("bfloat16", 16, 36, 64, 4),
        ("bfloat16", 2, 64, 64, 1),
        ("float64", 16, 64, 64, 2),
        ("float64", 4, 64, 64, 1),
    ],
)
def test_loads_are_as_wide_as_alignment_and_head_dims_allow(
    dtype: str, vector_bytes: int, d: int, dv: int, width: int
) -> None:
    plan = plan_forward(problem_of(dtype, d, dv), HOPPER, None, vector_bytes)
    assert plan.config.load_width == width


def test_16_bit_values_and_old_devices_take_the_synchronous_path() -> None:
    assert plan_forward(problem_of(), HOPPER).config.async_copy
    assert not plan_forward(problem_of("bfloat16"), HOPPER).config.async_copy
    assert not plan_forward(problem_of(), Device.known("sm_75")).config.async_copy


def test_grid() -> None:
    plan = plan_forward(problem_of(), HOPPER)
    assert plan.launch.blocks == -(-300 // plan.tiling.block_m) * 4 * 2
    backward = plan_backward(problem_of(), HOPPER)
    assert backward.dkdv.blocks == -(-500 // backward.config_dkdv.block_n) * 2 * 2
    assert backward.dq.blocks == -(-300 // backward.config_dq.block_m) * 4 * 2
    assert backward.delta.blocks * 8 >= 2 * 300 * 4
    varlen = plan_forward(problem_of(varlen=True), HOPPER)
    assert varlen.launch.blocks == (300 // varlen.tiling.block_m + 3) * 4


@pytest.mark.parametrize("empty", [{"batch": 0}, {"seqlen_q": 0}])
def test_nothing_is_launched_for_no_queries(empty: dict[str, int]) -> None:
    assert plan_forward(problem_of(**empty), HOPPER).launch.blocks == 0
    assert plan_backward(problem_of(**empty), HOPPER).dq.blocks == 0


def test_key_gradients_are_written_without_queries() -> None:
    assert plan_backward(problem_of(seqlen_q=0), HOPPER).dkdv.blocks > 0
    assert plan_backward(problem_of(seqlen_k=0), HOPPER).dkdv.blocks == 0


def test_sinks_add_a_kernel() -> None:
    plan = plan_backward(problem_of(extras=frozenset({"sinks"})), HOPPER)
    assert [launch.entry for launch in plan.launches][-1] == "cupyflash_grad_sinks"
    assert "compute_grad_sinks" in plan.stub
    assert "compute_grad_sinks" not in plan_backward(problem_of(), HOPPER).stub


def test_a_given_tiling_is_taken() -> None:
    tiling = Tiling(64, 32, 1, 4)
    assert plan_forward(problem_of(), HOPPER, tiling).tiling == tiling
    backward = plan_backward(problem_of(), HOPPER, tiling)
    assert (backward.config_dq.block_m, backward.config_dq.block_n) == (64, 32)
    assert backward.tiling == tiling


@pytest.mark.parametrize(
    ("tiling", "limit"),
    [
        (Tiling(64, 64, 2, 4), "stages=1"),
        (Tiling(64, 64, 1, 16), "warps"),
        (Tiling(40, 64, 1, 4), "multiple of 4"),
        (Tiling(0, 64, 1, 4), "positive"),
        (Tiling(64, 20, 1, 4), "multiple of 8"),
        (Tiling(512, 8, 1, 4), "sums would take 512 registers"),
        (Tiling(128, 96, 1, 4), "scores would take 96 registers"),
        (Tiling(256, 64, 1, 8), "bytes of shared memory"),
    ],
)
def test_a_tiling_that_does_not_fit_names_the_limit(tiling: Tiling, limit: str) -> None:
    problem = problem_of(d=256, dv=32) if "bytes" in limit else problem_of(d=128, dv=128)
    with pytest.raises(UnsupportedError, match=limit):
        plan_forward(problem, HOPPER, tiling)


def test_lengths_beyond_the_index_range_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="sequence length"):
        plan_forward(problem_of(seqlen_k=2**30), HOPPER)
    with pytest.raises(UnsupportedError, match="tiles are more"):
        plan_forward(problem_of(batch=2**24, seqlen_q=2**16), HOPPER)


def struct_fields(name: str, header: str) -> list[str]:
    """Return the names of a struct's fields as they stand in a header."""
    text = (kernels_root() / "attention" / header).read_text()
    body = re.search(rf"struct {name} \{{(.*?)\n\}};", text, re.DOTALL)
    assert body is not None
    return re.findall(r"^  (?:const )?\w+\*? (\w+)(?:\[\d+\])?;", body[1], re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("ForwardParams", params.FORWARD_PARAMS),
        ("BackwardParams", params.BACKWARD_PARAMS),
        ("Attention", params.FORWARD_PARAMS["attention"]),
        ("Strides", params.FORWARD_PARAMS["query_strides"]),
        ("ScoreArrays", params.FORWARD_PARAMS["scores"]),
        ("ScoreStrides", params.FORWARD_PARAMS["scores"]["mask"]),
    ],
)
def test_params_have_the_fields_of_the_header(name: str, dtype: object) -> None:
    assert struct_fields(name, "params.cuh") == list(dtype.names)  # type: ignore[attr-defined]


@pytest.mark.parametrize("config", [ForwardConfig, BackwardConfig])
def test_configurations_have_the_fields_of_the_header(config: type) -> None:
    names = struct_fields(config.__name__, "config.cuh")
    assert names == list(config.__dataclass_fields__)  # type: ignore[attr-defined]


def test_alignment() -> None:
    assert arguments.alignment([0, 256]) == 16
    assert arguments.alignment([24]) == 8
    assert arguments.alignment([-4]) == 4
    assert arguments.row_alignment(16, [(1024, 256, 4)]) == 16
    assert arguments.row_alignment(16, [(1024, 36, 4)]) == 4
