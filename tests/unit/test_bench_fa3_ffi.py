"""The peer fa3-ffi on a made-up library, whose handlers read what a C compiler would."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupyflash._arrays import BFLOAT16
from cupyflash._cuda.device import Device
from cupyflash.bench import fa3_ffi_peer
from cupyflash.bench.fa3_ffi_peer import FlashAttention3Ffi
from cupyflash.bench.inputs import Inputs
from cupyflash.bench.peers import Ours
from cupyflash.bench.runner import Stopwatch, race
from cupyflash.bench.workloads import DIRECTIONS, Workload
from cupyflash.bench.xla_ffi import Call
from tests.bench_fakes import fake_times, make_inputs
from tests.ffi_fake import DeviceArray, FakeCupy, Library

HALF = Workload(2, 40, 40, 4, 2, 64, False, "float16")
STOPWATCH = Stopwatch(fake_times, lambda work: 1000)
PEER = FlashAttention3Ffi()


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    for module in ("xla_ffi", "xla_host"):
        monkeypatch.setattr(f"cupyflash.bench.{module}.require_cupy", lambda: fake)
    return fake


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, cupy: FakeCupy) -> Library:
    fake = Library()
    monkeypatch.setattr(fa3_ffi_peer, "_library", lambda: fake)
    return fake


def on_device(workload: Workload, rng: np.random.Generator) -> Inputs:
    inputs = make_inputs(workload, rng)
    return Inputs(*(each.view(DeviceArray) for each in vars(inputs).values()))


# --- what it computes ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_it_is_right_beside_ours(
    direction: str, causal: bool, dtype: str, rng: np.random.Generator, library: Library
) -> None:
    workload = replace(HALF, causal=causal, dtype=dtype)
    copies = [on_device(workload, rng) for _ in range(2)]
    found = race(workload, direction, [Ours(), PEER], copies, STOPWATCH)
    assert [(each.error, each.milliseconds) for each in found] == [(None, 1.0), (None, 2.0)]
    prepared = ["dew_flash3_mha_fwd"] * 2  # which the backward runs just once for each copy
    timed = ["dew_flash3_mha_bwd"] * 2 if direction == "backward" else []
    assert library.calls == prepared + timed


def test_every_call_has_results_of_its_own(rng: np.random.Generator, library: Library) -> None:
    work = PEER.forward(HALF, on_device(HALF, rng))
    (one,), (other,) = PEER.arrays(work()), PEER.arrays(work())
    assert not np.shares_memory(one, other)
    assert np.array_equal(one, other)


def test_results_are_of_the_inputs_dtype(rng: np.random.Generator, library: Library) -> None:
    workload = replace(HALF, dtype="bfloat16")
    gradients = PEER.arrays(PEER.backward(workload, on_device(workload, rng))())
    assert [each.dtype for each in gradients] == [BFLOAT16] * 3
    assert [each.shape[2] for each in gradients] == [4, 2, 2]


def test_scratch_is_cupys_until_the_handler_returns(
    rng: np.random.Generator, library: Library, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    was_running = []

    class Memory(SimpleNamespace):
        def __del__(self) -> None:
            was_running.append(library.running)

    monkeypatch.setattr(cupy.cuda, "alloc", lambda size: Memory(**vars(cupy.alloc(size))))
    PEER.backward(HALF, on_device(HALF, rng))()
    assert cupy.scratch == [1000] and was_running == [False]


# --- errors -------------------------------------------------------------------------------------


def test_the_library_says_what_is_wrong(rng: np.random.Generator, library: Library) -> None:
    library.fault = "no such head"
    with pytest.raises(RuntimeError, match="no such head"):
        PEER.forward(HALF, on_device(HALF, rng))()
    library.fault = None
    PEER.forward(HALF, on_device(HALF, rng))()


def test_full_memory_is_its_error(
    rng: np.random.Generator, library: Library, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(size: int) -> Any:
        raise MemoryError(f"no {size} bytes")

    work = PEER.backward(HALF, on_device(HALF, rng))
    monkeypatch.setattr(cupy.cuda, "alloc", full)
    with pytest.raises(RuntimeError, match="no scratch: MemoryError: no 1000 bytes"):
        work()


def test_strides_are_refused(rng: np.random.Generator, library: Library) -> None:
    inputs = on_device(HALF, rng)
    turned = inputs.query.swapaxes(1, 2)
    with pytest.raises(ValueError, match="C-contiguous"):
        Call(library["dew_flash3_mha_fwd"], [turned], [], {})


# --- where it takes part ------------------------------------------------------------------------


def test_it_knows_what_it_cannot_do() -> None:
    assert PEER.supports(HALF) and PEER.supports(replace(HALF, num_heads=2, dtype="bfloat16"))
    assert all(PEER.supports(replace(HALF, head_dim=each)) for each in (64, 128, 192, 256))
    for changes in ({"head_dim": 96}, {"seqlen_k": 50}, {"dtype": "float32"}):
        assert not PEER.supports(replace(HALF, **changes))


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wheel's package, without its library; importing it is an error."""
    package = tmp_path / "dew_flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('this would load JAX')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return package


def test_without_the_wheel_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dew_flash_attn", None)
    assert "pip install --no-deps dew-flash-attn-cu13" in str(PEER.available())


def test_an_older_wheel_lacks_its_library(wheel: Path) -> None:
    assert "pip install --no-deps dew-flash-attn-cu13" in str(PEER.available())


def test_a_broken_library_is_a_reason(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (wheel / "libdew_flash_attn3.so").write_bytes(b"not a library")
    loaded = []
    pathfinder = SimpleNamespace(load_nvidia_dynamic_lib=loaded.append)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", pathfinder)
    assert "OSError" in str(PEER.available())
    assert loaded == ["cudart"] and "dew_flash_attn" not in sys.modules


def test_cudas_runtime_is_found_where_the_wheel_does_not_look(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (wheel / "libdew_flash_attn3.so").touch()
    loaded: list[str] = []

    def load(path: str) -> str:
        if not loaded:
            raise OSError("libcudart.so.13: cannot open shared object file")
        return path

    pathfinder = SimpleNamespace(load_nvidia_dynamic_lib=loaded.append)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", pathfinder)
    monkeypatch.setattr(fa3_ffi_peer, "CDLL", load)
    assert fa3_ffi_peer._library() == str(wheel / "libdew_flash_attn3.so")


@pytest.mark.parametrize(("arch", "reason"), [("sm_90a", None), ("sm_80", "has 8.0")])
def test_it_runs_on_hopper_alone(
    arch: str, reason: str | None, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (wheel / "libdew_flash_attn3.so").touch()
    monkeypatch.setattr(fa3_ffi_peer, "CDLL", lambda path: path)
    monkeypatch.setattr(fa3_ffi_peer, "current", lambda: Device.known(arch))
    said = PEER.available()
    assert said is None if reason is None else reason in str(said)
