"""What is timed and who takes part: workloads, arrays, checks against references, peers."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupyflash._arrays import BFLOAT16
from cupyflash.bench import command
from cupyflash.bench.inputs import disagreement, draw, reference_rows, sampled
from cupyflash.bench.peers import PEERS, NaiveCupy, Ours, naive_gradients, naive_weights
from cupyflash.bench.workloads import (
    DIRECTIONS,
    HEAD_DIMS,
    SEQLENS,
    Workload,
    grid,
    of_shapes,
    parse_shape,
)
from tests.bench_fakes import SMALL, make_inputs
from tests.cases import FLOAT8

# --- workloads ----------------------------------------------------------------------------------


def test_operations_are_those_of_the_papers() -> None:
    full = Workload(2, 1024, 1024, 16, 4, 128, False, "bfloat16")
    assert full.flops("forward") == 4 * 2 * 16 * 1024**2 * 128
    assert full.flops("backward") == 2.5 * full.flops("forward")
    assert replace(full, causal=True).flops("forward") == full.flops("forward") / 2


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 100), (7, 100), (100, 100), (100, 7)])
def test_causal_operations_count_what_the_mask_leaves(seqlen_q: int, seqlen_k: int) -> None:
    workload = Workload(1, seqlen_q, seqlen_k, 1, 1, 1, True, "float16")
    visible = np.tri(seqlen_q, seqlen_k, seqlen_k - seqlen_q).sum()
    diagonal = min(seqlen_q, seqlen_k) / 2
    assert workload.flops("forward") == 4 * (visible - diagonal)


def test_grid_has_16384_tokens_everywhere() -> None:
    workloads = grid(HEAD_DIMS, SEQLENS, "bfloat16")
    assert len(workloads) == len(set(workloads)) == 36
    assert {each.batch * each.seqlen_q for each in workloads} == {16384}
    assert {each.num_heads * each.head_dim for each in workloads} == {2048}


def test_names_tell_workloads_apart() -> None:
    assert SMALL.name == "2 x 40 x 4/2 x 16 full"
    assert replace(SMALL, seqlen_k=50, causal=True).name == "2 x 40/50 x 4/2 x 16 causal"


def test_shapes_are_read() -> None:
    assert parse_shape("2,1024,32,128") == (2, 1024, 32, 128, 32)
    assert parse_shape("2,1024,32,128,8") == (2, 1024, 32, 128, 8)
    both = list(of_shapes([parse_shape("2,1024,32,128,8")], "float16"))
    assert [each.causal for each in both] == [False, True]
    assert both[0].num_heads_kv == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2,1024,32", "b,s,h,d or b,s,h,d,hk"),
        ("2,1k,32,64", "whole numbers"),
        ("0,1,1,1", "at least 1"),
        ("1,1,1,257", "at most 256, got 257"),
        ("1,1,32,64,5", "h = 32 must be a multiple of hk = 5"),
    ],
)
def test_bad_shapes_are_explained(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        parse_shape(text)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn"])
def test_arrays_are_drawn_in_their_dtype(
    dtype: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def standard_normal(shape: tuple[int, ...], dtype: str) -> Any:
        return rng.standard_normal(shape, dtype=np.dtype(dtype))

    random = SimpleNamespace(standard_normal=standard_normal)
    cupy = SimpleNamespace(**vars(np) | {"random": random})
    monkeypatch.setattr("cupyflash.bench.inputs.require_cupy", lambda: cupy)
    drawn = draw(replace(SMALL, seqlen_k=50, dtype=dtype))
    assert drawn.query.shape == drawn.grad_out.shape == (2, 40, 4, 16)
    assert drawn.key.shape == drawn.value.shape == (2, 50, 2, 16)
    query = drawn.query.view(FLOAT8) if dtype == FLOAT8.name else drawn.query
    assert str(query.dtype) == dtype
    numbers = query.astype(np.float64)
    assert abs(numbers.mean()) < 0.1 and abs(numbers.std() - 1) < 0.1


# --- checks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 40, 100])
def test_reference_agrees_with_the_numpy_engine(
    causal: bool, seqlen_q: int, rng: np.random.Generator
) -> None:
    workload = replace(SMALL, seqlen_q=seqlen_q, seqlen_k=100, causal=causal)
    inputs, ours = make_inputs(workload, rng), Ours()
    rows = reference_rows(workload, inputs)
    for direction, expected in zip(DIRECTIONS, rows, strict=True):
        first, *_ = ours.arrays(getattr(ours, direction)(workload, inputs)())
        assert disagreement([sampled(workload, first)], [expected]) < 1e-5


@pytest.mark.parametrize("causal", [False, True])
def test_naive_attention_agrees_with_ours(causal: bool, rng: np.random.Generator) -> None:
    workload = replace(SMALL, num_heads_kv=4, seqlen_k=70, causal=causal)
    inputs, ours, naive = make_inputs(workload, rng), Ours(), NaiveCupy()
    for direction in DIRECTIONS:
        expected = ours.arrays(getattr(ours, direction)(workload, inputs)())
        found = naive.arrays(getattr(naive, direction)(workload, inputs)())
        assert disagreement(found, expected) < 1e-5


def test_naive_attention_keeps_the_dtype(rng: np.random.Generator) -> None:
    query, key, value, grad_out = rng.standard_normal((4, 1, 2, 8, 16)).astype(np.float16)
    weights = naive_weights(query, key, True)
    gradients = naive_gradients(query, key, value, grad_out, weights)
    assert {each.dtype for each in (weights, *gradients)} == {np.dtype(np.float16)}


def test_disagreement_is_relative_and_sees_nan() -> None:
    right = np.full((4, 4), 2.0)
    assert disagreement([right * 1.5], [right]) == 0.5
    assert disagreement([right, right * 1.5], [right, right]) == 0.5
    assert np.isnan(disagreement([right * np.nan, right], [right, right]))
    half = right.astype(BFLOAT16)
    assert disagreement([half], [half]) == 0
    with pytest.raises(ValueError, match=r"shape \(2, 4\)"):
        disagreement([right[:2]], [right])


# --- who takes part -----------------------------------------------------------------------------


def test_peers_are_chosen_by_name() -> None:
    assert [each.name for each in command.chosen(["fa3", "torch-flash"])] == ["torch-flash", "fa3"]
    assert [each.name for each in command.chosen(["all"])] == list(PEERS)
    assert command.chosen([]) == []


def test_every_peer_that_is_left_out_has_a_reason() -> None:
    taking_part, left_out = command.present(list(PEERS.values()))
    assert {each.name for each in taking_part} | set(left_out) == set(PEERS)
    assert all(left_out.values())


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    _, left_out = command.present(list(PEERS.values()))
    without_torch = ("naive-cupy", "fa3-ffi")
    assert all("torch" in left_out[name] for name in PEERS if name not in without_torch)


def test_peers_know_what_they_cannot_do() -> None:
    half = Workload(1, 64, 64, 4, 4, 64, True, "float16")
    assert all(peer.supports(half) for peer in PEERS.values())

    def supporters(**changes: Any) -> set[str]:
        workload = replace(half, **changes)
        return {name for name, peer in PEERS.items() if peer.supports(workload)}

    assert supporters(dtype="bfloat16") == set(PEERS) - {"naive-cupy"}
    assert supporters(dtype=FLOAT8.name) == {"fa3"}
    assert supporters(dtype="float32") == {"naive-cupy", "materialised"}
    assert supporters(num_heads_kv=2) == set(PEERS) - {"naive-cupy", "materialised"}
    assert supporters(seqlen_q=32) == {"naive-cupy", "materialised", "fa3", "fa4"}
    assert not supporters(seqlen_q=2**17, seqlen_k=2**17) & {"naive-cupy", "materialised"}
