"""Kernels as shared libraries for the host, kept in build/emulator by what they are made of."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import subprocess
from functools import cache
from pathlib import Path

from cupyflash._cuda.source import include_closure, kernels_root

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[1] / "build" / "emulator"
COMPILER = ["g++", "-std=c++20", "-w", "-fPIC", "-fno-strict-aliasing"]
# Kernels are compiled for seconds and run for milliseconds: -O1. Contraction is off, as sums are
# compared bit by bit; and libraries must not share the statics of templates.
KERNEL_FLAGS = ["-O1", "-ffp-contract=off", "-fno-extern-tls-init", "-fno-gnu-unique", "-shared"]


@cache
def reason_to_skip() -> str | None:
    """Return why nothing can be emulated on this machine, or None."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return "the emulator switches stacks with x86-64's instructions"
    command = [*COMPILER, "-x", "c++", "-fsyntax-only", "-"]
    program = "template <int n> requires(n > 0) _Float16 half() { return n; }"
    try:
        compiled = subprocess.run(command, input=program, capture_output=True, text=True)
    except FileNotFoundError:
        return "the emulator needs g++, which is not installed"
    return "the emulator needs a g++ with C++20 and _Float16" if compiled.returncode else None


@cache
def library(stub: str) -> ctypes.CDLL:
    """Return the kernels of a stub, the generated source that includes a kernel's header."""
    source = re.sub(r"const __grid_constant__ (\w+) params", r"const \1& params", stub)
    headers = "".join(include_closure(stub).values())
    folders = ["-include", "builtins.h", "-I", str(HERE), "-I", str(kernels_root())]
    arguments = [*KERNEL_FLAGS, *folders]
    return ctypes.CDLL(str(_compiled(source, arguments, ".so", headers, _runtime())))


@cache
def _runtime() -> tuple[str, ...]:
    """Return the objects that every library is linked with."""
    arguments = ["-O3", "-c", "-I", str(HERE)]
    sources = sorted(HERE.glob("*.cpp"))
    return tuple(str(_compiled(path.read_text("utf-8"), arguments, ".o")) for path in sources)


def _text(pattern: str) -> str:
    return "".join(path.read_text("utf-8") for path in sorted(HERE.glob(pattern)))


@cache
def _own_sources() -> str:
    return _text("*.h") + _text("*.cpp") + _text("arch/*.cuh") + platform.machine()


def _compiled(
    source: str, arguments: list[str], suffix: str, headers: str = "", objects: tuple[str, ...] = ()
) -> Path:
    """Return the file that the compiler makes of `source`, from the cache if it is there."""
    everything = "\n".join([source, headers, _own_sources(), *COMPILER, *arguments])
    result = FOLDER / (hashlib.sha256(everything.encode()).hexdigest()[:24] + suffix)
    if not result.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        unfinished = result.with_suffix(f".{os.getpid()}{suffix}")
        command = [*COMPILER, *arguments, "-x", "c++", "-", "-x", "none", *objects]
        run = subprocess.run(
            [*command, "-o", str(unfinished)], input=source, capture_output=True, text=True
        )
        if run.returncode:
            raise RuntimeError(f"g++ refused a kernel:\n{run.stderr[:4000]}\n{source}")
        unfinished.replace(result)
    return result
