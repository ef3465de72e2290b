"""Calls for the GPU engines on host arrays: all of `cupyflash`, but CUDA's own parts."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from cupyflash import UnsupportedError, _dispatch, _engines, kvcache
from cupyflash._arrays import has_contiguous_last_axis
from cupyflash._cuda import (
    arguments,
    backward,
    decode,
    forward,
    score_gradients,
    tensor_map,
)
from cupyflash._cuda.device import Device
from cupyflash._cuda.device_table import DeviceTable
from cupyflash._cuda.engines import PLANNERS, lacks
from cupyflash._cuda.launch import Moved, _varying_format
from cupyflash._cuda.score_source import ScoreSource
from tests import memory
from tests.emulator import build
from tests.emulator.tensor_map import encode_tiled

ENGINES = ("simt", "mma", "wgmma")
# So few multiprocessors that the blocks of a persistent kernel get several tiles of small calls.
DEVICE = replace(Device.known("sm_90a"), multiprocessors=3)
_DEVICE_ID = -1  # no GPU's: what is prepared for this one is cached beside theirs
_PARAMS_ALIGNMENT = 64


class DeviceArray(np.ndarray):
    """A host array with what the package asks of CuPy's."""

    device = SimpleNamespace(id=_DEVICE_ID)

    @property
    def data(self) -> Any:
        """Its memory, as CuPy's pointer."""
        start = self.ctypes.data
        return SimpleNamespace(
            ptr=start, memset_async=lambda value, size: ctypes.memset(start, value, size)
        )


class Launcher:
    """In place of `cupyflash._cuda.launch.Launcher`: runs the kernel before it returns."""

    def __init__(
        self,
        function: tuple[Any, str],
        device_id: int,
        parameters: np.ndarray,
        varying: tuple[str, ...],
        *,
        threads: int,
        shared_memory: int = 0,
        moved: Sequence[Moved] = (),
        tables: Mapping[str, DeviceTable] = MappingProxyType({}),
    ) -> None:
        self._library, self._name = function
        self._held = {name: table.make() for name, table in tables.items()}
        parameters = parameters.reshape(1).copy()
        for name, values in self._held.items():
            parameters[name] = _address(values)
        self._parameters = parameters.view(np.uint8)
        self._threads, self._shared_memory = threads, shared_memory
        self._offset, self._format = _varying_format(parameters.dtype, varying)
        self._moved = [(each.offset, list(varying).index(each.field), each.shift) for each in moved]

    def __call__(self, blocks: int, *values: float) -> None:
        if blocks == 0:
            return
        size = self._parameters.size
        room = np.zeros(size + _PARAMS_ALIGNMENT, np.uint8)
        start = -room.ctypes.data % _PARAMS_ALIGNMENT
        room[start : start + size] = self._parameters
        struct.pack_into(self._format, room.data, start + self._offset, *values)
        for offset, index, shift in self._moved:
            struct.pack_into("Q", room.data, start + offset, values[index] + shift)
        function = ctypes.cast(getattr(self._library, self._name), ctypes.c_void_p)
        params = ctypes.c_void_p(room.ctypes.data + start)
        launch = self._library.emulator_launch
        launch.restype = ctypes.c_char_p
        complaint = launch(function, blocks, self._threads, self._shared_memory, params)
        assert complaint is None, f"{self._name}: {complaint.decode()}"


class LaunchSequence:
    """In place of `cupyflash._cuda.launch.LaunchSequence`."""

    def __init__(self, kernels: Any, device_id: int, parameters: Any, varying: Any) -> None:
        self._launchers = [
            (Launcher(function, device_id, parameters, varying, threads=threads,
                      shared_memory=memory), blocks)
            for function, blocks, threads, memory in kernels
        ]  # fmt: skip

    def current_stream(self) -> None:
        """There is none."""

    def run(self, stream: None, values: tuple[float, ...]) -> None:
        for launcher, blocks in self._launchers:
            launcher(blocks, *values)


def _load(stub: str, entries: Any, device_id: int = 0, plan: Any = None) -> Any:
    """In place of `module.load`."""
    library = build.library(stub)
    return SimpleNamespace(get_function=lambda name, shared_memory=0: (library, name))


def _address(array: Any) -> int:
    return 0 if array is None else array.ctypes.data


def _allocate(sizes: dict[str, tuple[int, str]]) -> dict[str, Any]:
    """In place of `scratch.allocate`; all bits set, so that floats are NaN."""
    arrays = {}
    for name, (size, dtype) in sizes.items():
        array = np.empty(size, dtype)
        array.view(np.uint8)[...] = 0xFF
        arrays[name] = array.view(DeviceArray)
    return arrays


def _allocate_bytes(size: int, stream: None) -> Any:
    """In place of `scratch.allocate_bytes`."""
    array = _allocate({"bytes": (size, "uint8")})["bytes"]
    return SimpleNamespace(ptr=_address(array), array=array)


def _select(
    original: Callable[..., str],
    problem: Any,
    place: Any,
    named: str | None,
    operands: Any = None,
) -> str:
    """In place of `_engines.select`: host arrays may ask for an emulated engine."""
    if named not in ENGINES:
        return original(problem, place, named, operands)
    missing = lacks(named, problem, DEVICE, operands and _on_device(operands))
    if missing:
        raise UnsupportedError(f"engine={named!r} lacks {', '.join(missing)}")
    return named


def _choose_tiling(
    original: Callable[..., Any],
    problem: Any,
    place: Any,
    named: str | None,
    tiling: Any,
    operands: Any = None,
) -> Any:
    """In place of `_engines.choose_tiling`."""
    if named not in ENGINES:
        return original(problem, place, named, tiling, operands)
    engine = _engines.select(problem, place, named, operands=operands)
    planned = PLANNERS[engine].plan_forward(problem, DEVICE, tiling)
    return replace(planned.tiling, origin="given" if tiling else "table")


def _run(function: Callable[..., None], problem: Any, operands: Any, *rest: Any) -> None:
    """Call an engine's `function` as for device arrays."""
    score_mod = operands.score_mod
    if score_mod is not None:
        problem = replace(problem, score_mod=ScoreSource.of(score_mod))
    function(problem, _on_device(operands), *map(_placed, rest))


def _on_device(operands: Any) -> Any:
    """`operands` with q, k, v and the bias on the emulated device."""
    names = ("query", "key", "value", "bias")
    return replace(operands, **{name: _view(getattr(operands, name)) for name in names})


def _placed(argument: Any) -> Any:
    """`argument`, its gradients of a score_mod's arrays on the emulated device."""
    gradients = getattr(argument, "dscore_params", None)
    if gradients is None:
        return argument
    placed = {name: _view(gradient) for name, gradient in gradients.items()}
    return replace(argument, dscore_params=placed)


def _view(array: Any) -> Any:
    return None if array is None else array.view(DeviceArray)


def _function(original: Callable[[str], Any], cuda: Callable[..., None], engine: str) -> Any:
    """In place of `_engines.forward` and `_engines.backward`."""
    return partial(_run, partial(cuda, engine)) if engine in ENGINES else original(engine)


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    """What is replaced: owner, name, by what."""
    yield memory, "ON_HOST", {*memory.ON_HOST, *ENGINES}
    yield _engines, "select", partial(_select, _engines.select)
    yield _engines, "choose_tiling", partial(_choose_tiling, _engines.choose_tiling)
    yield _engines, "forward", partial(_function, _engines.forward, forward.forward)
    yield _engines, "backward", partial(_function, _engines.backward, backward.backward)
    yield _dispatch, "_engine_writes", lambda array, place: has_contiguous_last_axis(array)
    yield _dispatch, "keep", lambda *arrays: None  # nothing is captured
    faults = np.zeros(2, np.int32)
    yield decode, "faults_of", lambda device_id: faults
    yield kvcache, "kernel_device", lambda place, engine: DEVICE if engine == "mma" else None
    yield decode, "LaunchSequence", LaunchSequence
    for module in (forward, backward, score_gradients):
        yield module, "Launcher", Launcher
    for module in (forward, backward, score_gradients):
        yield module, "allocate", _allocate
        yield module, "address", _address
    for module in (forward, backward, score_gradients, decode):
        yield module, "load", _load
    yield decode, "allocate_bytes", _allocate_bytes
    yield decode, "address", _address
    yield decode, "addresses", lambda arrays: [_address(array) for array in arrays]
    yield arguments, "address", _address
    yield tensor_map, "_encoder", lambda: encode_tiled
    yield tensor_map, "address_offset", tensor_map.address_offset.__wrapped__
    for module in (forward, backward):
        yield module, "describe", lambda device_id: DEVICE


@contextmanager
def emulated() -> Iterator[None]:
    """Let the GPU engines serve host arrays in this context when they are named."""
    with ExitStack() as stack:
        for owner, name, by in list(_replacements()):
            stack.enter_context(mock.patch.object(owner, name, by))
        yield
