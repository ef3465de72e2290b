"""The command line: ``python -m cupyflash info | demo | warmup | bench | clear-cache``."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from typing import Any

import cupyflash
from cupyflash._cuda import cache, device, module, tuned
from cupyflash._cuda.engines import PLANNERS, lacks, runs_on
from cupyflash._demo.progress import progress
from cupyflash._problem import Problem
from cupyflash.bench import command as bench_command
from cupyflash.bench.workloads import parse_head_dim
from cupyflash.errors import CompileError, NoDeviceError

_DTYPES = ["float16", "bfloat16", "float32", "float64"]


def main(arguments: list[str] | None = None) -> None:
    """Run one command; errors that a user can cure end it with one line and exit status 1."""
    chosen = vars(_parser().parse_args(arguments))
    command = chosen.pop("command")
    try:
        command(**chosen)
    except (NoDeviceError, CompileError) as error:
        sys.exit(f"cupyflash: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cupyflash", description=cupyflash.__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    def add(name: str, command: object, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(command=command)
        return added

    add("info", info, "show device, engines, versions and kernel cache")
    demo_parser = add("demo", demo, "embed sentences, on whatever this machine has")
    demo_parser.add_argument(
        "--device", choices=("cpu", "gpu"), help="default: the GPU if there is one"
    )
    warmup_parser = add("warmup", warmup, "compile the common kernels ahead of their first use")
    warmup_parser.add_argument(
        "--arch", dest="gpu", metavar="sm_XX", type=_known_gpu, help="needs no GPU; such as sm_90"
    )
    warmup_parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=_DTYPES,
        default=_DTYPES[:3],
        metavar="DTYPE",
        help="default: float16 bfloat16 float32",
    )
    warmup_parser.add_argument(
        "--head-dims",
        nargs="+",
        type=parse_head_dim,
        default=[64, 128],
        metavar="DIM",
        help="default: 64 128",
    )
    bench_parser = add("bench", bench_command.bench, "time attention beside every installed peer")
    bench_command.add_arguments(bench_parser)
    add("clear-cache", clear_cache, "delete the compiled kernels and remembered tilings")
    return parser


def _known_gpu(arch: str) -> device.Device:
    """Find the GPU that stands for an architecture; Hopper's may be given without the a."""
    for name in (arch, f"{arch}a"):
        with suppress(KeyError):
            return device.Device.known(name)
    known = ", ".join(device.KNOWN)
    raise argparse.ArgumentTypeError(
        f"{arch!r} is not among the architectures that cupyflash knows: {known}"
    )


def info() -> None:
    """Print what a bug report needs; never fails, whatever the machine lacks."""
    kernels = _count(len(cache.entries()), "kernel")
    rows = {
        "cupyflash": cupyflash.__version__,
        "Python": f"{sys.version.split()[0]} on {sys.platform}",
        "NumPy": _version("numpy"),
        "ml_dtypes": _version("ml_dtypes"),
        "CuPy": _version("cupy"),
        "NVRTC": _nvrtc(),
        "device": _device(),
        "engines": ", ".join(_usable_engines()),
        "cache": f"{cache.path()}: {kernels}, {cache.size() / 1e6:.1f} MB",
        "tuned": f"{_count(len(tuned.entries()), 'tiling')}, by python -m cupyflash bench --tune",
    }
    for name, value in rows.items():
        print(f"{name:<11} {value}")


def _version(name: str) -> str:
    try:
        return str(importlib.import_module(name).__version__)
    except ImportError:
        return "not installed"


def _nvrtc() -> str:
    from cupyflash._cuda.compiler import nvrtc_version

    try:
        major, minor = nvrtc_version()
    except (CompileError, OSError) as error:
        return str(error)
    return f"{major}.{minor}"


def _device() -> str:
    try:
        gpu = device.current()
    except NoDeviceError as error:
        return f"none: {error}"
    return (
        f"{gpu.name}, {gpu.arch}, {gpu.multiprocessors} multiprocessors, "
        f"{gpu.shared_memory_per_block_optin // 1024} KiB shared memory a block"
    )


def _usable_engines() -> list[str]:
    try:
        gpu = device.current()
    except NoDeviceError:
        return ["numpy"]
    return ["numpy", *(name for name in PLANNERS if runs_on(name, gpu))]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def demo(device: str | None) -> None:
    """Run the demo, which is imported for nothing else."""
    from cupyflash._demo.run import run_demo

    run_demo(device)


def warmup(gpu: device.Device | None, dtypes: list[str], head_dims: list[int]) -> None:
    """Compile the common kernels for `gpu`, or for the one that is here, into the cache."""
    gpu = gpu or device.current()
    plans: list[Any] = []
    for problem in _common_problems(dtypes, head_dims):
        engine = next(name for name in PLANNERS if not lacks(name, problem, gpu))
        plans.append(PLANNERS[engine].plan_forward(problem, gpu))
        plans.append(PLANNERS[engine].plan_backward(problem, gpu))
    before, start = len(cache.entries()), time.perf_counter()
    for plan in progress(plans, f"compiling for {gpu.arch}"):
        entry_names = [launch.entry for launch in plan.launches]
        _, cubin = module.build(plan.stub, entry_names, gpu.arch, plan=plan)
        if cubin.path is None:
            sys.exit(f"cupyflash: nothing is kept, as {cache.path()} cannot be written")
    compiled, seconds = len(cache.entries()) - before, time.perf_counter() - start
    print(
        f"compiled {_count(compiled, 'kernel')} for {gpu.arch} in {seconds:.1f} s, "
        f"{len(plans) - compiled} of {len(plans)} were there: {cache.path()}"
    )


def _common_problems(dtypes: list[str], head_dims: list[int]) -> Iterator[Problem]:
    """Attention with and without causal; lengths and numbers of heads are not compiled in."""
    for dtype, dim, window_right in product(dtypes, head_dims, (None, 0)):
        yield Problem(dtype, 1, 1, 1, 1, 1, dim, dim, dim**-0.5, window_right=window_right)


def clear_cache() -> None:
    """Delete the compiled kernels and what tuning remembers, and say how much that was."""
    size, tilings = cache.size(), len(tuned.entries())
    count = cache.clear()
    removed = f"{_count(count, 'kernel')}, {_count(tilings, 'tiling')}, {size / 1e6:.1f} MB"
    print(f"removed {removed}, from {cache.path()}")


if __name__ == "__main__":
    main()
