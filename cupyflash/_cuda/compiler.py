"""NVRTC by ctypes: CUDA source in, cubin and resource usage out; needs neither GPU nor driver.

CuPy's own compiler is not used: it never targets ``sm_90a``, forces ``-ftz=true``, keeps no track
of included headers, and drops the last byte of the cubin.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module

from cupyflash._cuda import cache as cubin_cache
from cupyflash._cuda.source import include_closure
from cupyflash.errors import CompileError

__all__ = ["OPTIONS", "Compilation", "EntryUsage", "compile_source", "nvrtc_version"]

# No fast math and no flush to zero: float32 results are exact to rounding, denormals are kept.
# Headers come from memory only, so that the cache key covers every text that the compiler sees.
OPTIONS = ("-std=c++20", "--ptxas-options=-v", "--no-source-include")
_STUB_NAME = "stub.cu"
_LOG_LINES_SHOWN = 12
# Loading NVRTC, and its first compilation, which loads the built-ins, fail beside another thread's.
_nvrtc_lock = threading.RLock()

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_PTXAS_WARNING = re.compile(r"^.*\(C75\d\d\).*$", re.MULTILINE)


@dataclass(frozen=True)
class EntryUsage:
    """What ptxas gave one kernel; the memory sizes are bytes a thread.

    Functions that were not inlined count with the entry they belong to.
    """

    registers: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0


@dataclass(frozen=True)
class Compilation:
    """A cubin and the log of its compilation."""

    cubin: bytes
    log: str

    @cached_property
    def entries(self) -> dict[str, EntryUsage]:
        """Resource usage by entry name."""
        parts = _ENTRY.split(self.log)
        return {name: _usage(text) for name, text in zip(parts[1::2], parts[2::2], strict=True)}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Log lines of ptxas's C75xx family: wgmma serialised, setmaxnreg ignored, and so on."""
        return tuple(line.strip() for line in _PTXAS_WARNING.findall(self.log))


def _usage(text: str) -> EntryUsage:
    frames = [tuple(map(int, found)) for found in _FRAME.findall(text)]
    registers = [int(found) for found in _REGISTERS.findall(text)]
    return EntryUsage(max(registers, default=0), *map(sum, zip(*frames, strict=True)))


def compile_source(
    stub: str,
    arch: str,
    options: Sequence[str] = (),
    *,
    headers: Mapping[str, str] | None = None,
    plan: object = "",
) -> Compilation:
    """Compile a stub to a cubin.

    Parameters
    ----------
    stub : str
        CUDA source; includes are names relative to ``kernels/``.
    arch : str
        Real architecture such as ``"sm_80"`` or ``"sm_90a"``.
    options : sequence of str, optional
        NVRTC options beyond `OPTIONS`.
    headers : mapping of str to str, optional
        Include name -> text. Default: `include_closure(stub)`.
    plan : object, optional
        What is being compiled; its text is quoted in the error.

    Raises
    ------
    CompileError
        The source does not compile, or there is no NVRTC. The message holds the plan, the compiler
        version, the first lines of the log and the path of the saved source.
    """
    nvrtc = _nvrtc()
    headers = include_closure(stub) if headers is None else headers
    program = ctypes.c_void_p()
    _check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program),
            stub.encode(),
            _STUB_NAME.encode(),
            len(headers),
            _strings(headers.values()),
            _strings(headers),
        )
    )
    try:
        arguments = (f"-arch={arch}", *OPTIONS, *options)
        with _nvrtc_lock:
            status = nvrtc.nvrtcCompileProgram(program, len(arguments), _strings(arguments))
        log = _output(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
        if status != 0:
            raise CompileError(_explain(stub, arguments, log, plan))
        return Compilation(_output(program, "CUBIN"), log)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def nvrtc_version() -> tuple[int, int]:
    """Return NVRTC's (major, minor) version."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def _nvrtc() -> ctypes.CDLL:
    with _nvrtc_lock:
        return _loaded_nvrtc()


@cache
def _loaded_nvrtc() -> ctypes.CDLL:
    """Load the NVRTC that CuPy uses: both ask cuda.pathfinder, which searches wheels, then CUDA."""
    try:
        pathfinder = import_module("cuda.pathfinder")
        path = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    except (ImportError, RuntimeError, OSError) as error:
        raise CompileError(
            f"no kernel can be compiled, as NVRTC was not found ({error}). Install it:"
            " pip install 'cupyflash[cuda13]' (cuda12 for a driver older than 580);"
            " or set CUDA_PATH to a CUDA toolkit."
        ) from error
    library = ctypes.CDLL(path)
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _check(status: int) -> None:
    if status != 0:
        raise CompileError(f"NVRTC failed: {_nvrtc().nvrtcGetErrorString(status).decode()}")


def _strings(texts: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _output(program: ctypes.c_void_p, what: str) -> bytes:
    """Fetch one of NVRTC's outputs, all of its bytes."""
    size = ctypes.c_size_t()
    _check(getattr(_nvrtc(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(_nvrtc(), f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _explain(stub: str, arguments: Sequence[str], log: str, plan: object) -> str:
    major, minor = nvrtc_version()
    lines = log.splitlines()
    shown = "\n".join(f"  {line}" for line in lines[:_LOG_LINES_SHOWN])
    if len(lines) > _LOG_LINES_SHOWN:
        shown += f"\n  ... {len(lines) - _LOG_LINES_SHOWN} more lines"
    comment = "".join(f"// {line}\n" for line in (" ".join(arguments), *lines))
    saved = cubin_cache.save_failed(f"{stub.rstrip()}\n\n{comment}")
    return (
        f"a CUDA kernel did not compile: {plan or 'no plan given'}\n"
        f"compiler: NVRTC {major}.{minor}, {' '.join(arguments)}\n"
        f"log:\n{shown}\n"
        f"source and full log: {saved or 'could not be saved'}"
    )
