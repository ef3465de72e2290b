"""From a stub to loaded functions: key, cubin (cache or compiler), CuPy module."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupyflash._cuda import cache
from cupyflash._cuda.compiler import OPTIONS, compile_source, nvrtc_version
from cupyflash._cuda.device import describe, require_cupy
from cupyflash._cuda.source import include_closure

__all__ = ["LoadedModule", "build", "load"]

_DEFAULT_SHARED_MEMORY = 48 * 1024  # more has to be allowed function by function


@dataclass(frozen=True, eq=False)
class LoadedModule:
    """A cubin on one device."""

    device_id: int
    functions: dict[str, Any]  # entry name -> cupy.cuda.Function

    def get_function(self, name: str, shared_memory: int = 0) -> Any:
        """Return an entry, allowed to use `shared_memory` bytes of dynamic shared memory."""
        function = self.functions[name]
        if shared_memory > _DEFAULT_SHARED_MEMORY:
            cupy = require_cupy()
            driver = cupy.cuda.driver
            with cupy.cuda.Device(self.device_id):
                driver.funcSetAttribute(
                    function.ptr,
                    driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    shared_memory,
                )
        return function


_loaded: dict[tuple[str, tuple[str, ...], int], LoadedModule] = {}  # key, entries, device
_loading = threading.Lock()


def build(
    stub: str, entry_names: Sequence[str], arch: str, *, plan: object = ""
) -> tuple[str, cache.Cubin]:
    """Return a stub's key and cubin, compiled where the cache has none; no GPU is needed.

    Parameters
    ----------
    stub : str
        CUDA source.
    entry_names : sequence of str
        Its ``extern "C"`` entries; the first one names the cache file.
    arch : str
        Such as ``"sm_80"``.
    plan : object, optional
        What is being compiled, for the error's text.

    Raises
    ------
    CompileError
        The stub does not compile.
    """
    headers = include_closure(stub)
    named_headers = (part for header in headers.items() for part in header)
    key = cache.key_of((repr(nvrtc_version()), arch, *OPTIONS, stub, *named_headers))

    def compile_stub() -> bytes:
        return compile_source(stub, arch, headers=headers, plan=plan).cubin

    return key, cache.fetch(entry_names[0], key, stub, compile_stub)


def load(
    stub: str,
    entry_names: Sequence[str],
    arch: str | None = None,
    device_id: int | None = None,
    *,
    plan: object = "",
) -> LoadedModule:
    """Return these functions of a stub on a device, loaded once a process and device.

    Parameters are those of `build`; `arch` defaults to the device's, `device_id` to the current
    device. The hot path does not come here: keep the result.

    Raises
    ------
    CompileError
        The stub does not compile.
    NoDeviceError
        There is no usable GPU.
    """
    cupy = require_cupy()
    device_id = cupy.cuda.runtime.getDevice() if device_id is None else device_id
    key, cubin = build(stub, entry_names, arch or describe(device_id).arch, plan=plan)
    with _loading:
        wanted = key, tuple(entry_names), device_id
        module = _loaded.get(wanted)
        if module is None:
            with cupy.cuda.Device(device_id), _file_of(cubin) as file:
                raw = cupy.RawModule(path=str(file))
                functions = {name: raw.get_function(name).kernel for name in entry_names}
            module = _loaded[wanted] = LoadedModule(device_id, functions)
        return module


@contextmanager
def _file_of(cubin: cache.Cubin) -> Iterator[Path]:
    """Give the cubin's file; one that is not cached gets a file for as long as loading takes."""
    if cubin.path is not None:
        yield cubin.path
        return
    descriptor, name = tempfile.mkstemp(suffix=".cubin")
    try:
        with open(descriptor, "wb") as stream:
            stream.write(cubin.data)
        yield Path(name)
    finally:
        os.unlink(name)
