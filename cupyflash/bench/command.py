"""``python -m cupyflash bench``: ours and every installed peer, side by side on this GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from importlib import metadata
from math import ceil
from pathlib import Path
from typing import Any

import cupyflash
from cupyflash._arrays import Place
from cupyflash._cuda.cache import path
from cupyflash._cuda.device import Device, current, require_cupy
from cupyflash._engines import select
from cupyflash.bench import decode as decode_bench
from cupyflash.bench import features as feature_bench
from cupyflash.bench import flex_peer, report
from cupyflash.bench.inputs import Inputs, draw
from cupyflash.bench.options import Options, add_arguments
from cupyflash.bench.peers import PEERS, Contender, Ours
from cupyflash.bench.runner import Result, Stopwatch, race
from cupyflash.bench.timing import device_milliseconds, extra_bytes, host_microseconds, release
from cupyflash.bench.torch_peers import ceiling_tflops
from cupyflash.bench.tune import problem_of, tune_tiles
from cupyflash.bench.workloads import Workload
from cupyflash.errors import UnsupportedError

__all__ = ["add_arguments", "bench"]

_DISTRIBUTIONS = (
    "numpy", "cupy-cuda12x", "cupy-cuda13x", "torch", "tokenspeed-fa3",
    "dew-flash-attn-cu13", "flash-attn-4", "nvidia-cudnn-frontend",
)  # fmt: skip
_MOST_COPIES = 64


def bench(**given: Any) -> None:
    """Time everybody on every workload and print a row as soon as it is known.

    Parameters
    ----------
    **given
        By the names of `Options`; what is None has its default.

    Raises
    ------
    NoDeviceError
        There is no GPU.
    """
    options = Options.of(given)
    modes = {time_decoding: options.decode, tune_all: options.tune, time_features: options.features}
    mode = next((each for each, wanted in modes.items() if wanted), time_peers)
    stopwatch = Stopwatch(partial(device_milliseconds, rounds=options.rounds), extra_bytes)
    mode(options, current(), stopwatch)


def time_peers(options: Options, gpu: Device, stopwatch: Stopwatch) -> None:
    """Time ours and every peer that is wanted and here."""
    contenders, left_out = present([Ours(options.engine), *chosen(options.peers)])
    tell_left_out(left_out)
    names = [each.name for each in contenders]
    dtype = options.dtype
    ceiling = None if dtype == "float32" else ceiling_tflops(device_milliseconds)
    known = machine(gpu.name) | {"left_out": left_out, "dtype": dtype, "rounds": options.rounds}
    print(f"{gpu.name}: {dtype}, TFLOP/s; ratio, share of {_ceiling(ceiling)} and memory are ours")
    print(report.header(names))
    results: list[Result] = []
    for workload in options.workloads:
        copies = drawn(gpu, workload)
        for direction in options.directions:
            found = race(workload, direction, contenders, copies, stopwatch)
            print(report.lines(found, names, ceiling, results), flush=True)
            results += found
            release()
        if options.json is not None:  # every time, as a long run may be cut short
            write(options.json, report.to_json(results, known, ceiling))
    for direction, file in options.plots.items():
        title = f"{gpu.name}, {dtype}, {known['date'][:10]}"
        report.figure(results, direction, title).savefig(file, dpi=110)
        print(f"plot: {file}")


def tune_all(options: Options, gpu: Device, stopwatch: Stopwatch) -> None:
    """Tune the tiles of one engine, by default the fastest that serves the workload, for each."""
    print(f"{gpu.name}: a speed-up is the default's time over a tile's; kept in {path()}")
    for workload in options.workloads:
        try:
            serving = select(problem_of(workload), Place(gpu.id), options.engine)
        except UnsupportedError as error:
            print(f"{workload.name}: {error}", file=sys.stderr)
            continue
        copies = drawn(gpu, workload)
        for direction in options.directions:
            print(tune_tiles(workload, direction, serving, gpu, copies, stopwatch), flush=True)
            release()


def time_features(options: Options, gpu: Device, stopwatch: Stopwatch) -> None:
    """Time every feature beside the same call without it; torch-flex too, if it is wanted."""
    missing = flex_peer.missing() if options.peers else "not asked for"
    if missing:
        tell_left_out({flex_peer.NAME: missing})
    results: list[feature_bench.FeatureResult] = []
    for workload in options.workloads:
        print(f"{gpu.name}: {workload.name}, {workload.dtype}\n{feature_bench.header()}")
        inputs = draw(workload)
        for direction in options.directions:
            found = feature_bench.measure(
                workload, direction, inputs, options.engine, not missing, stopwatch.milliseconds
            )
            print("\n".join(map(feature_bench.line, found)), flush=True)
            results += found
            release()
        if options.json is not None:
            write(options.json, feature_bench.to_json(results, machine(gpu.name)))


def time_decoding(options: Options, gpu: Device, stopwatch: Stopwatch) -> None:
    """Time a step of generation at every shape of `decode.SHAPES`."""
    contenders, left_out = decode_bench.present(options.peers)
    tell_left_out(left_out)
    copy = decode_bench.copy_speed(stopwatch.milliseconds)
    print(f"{decode_bench.title(gpu.name, copy)}\n{decode_bench.header()}")
    results: list[decode_bench.DecodeResult] = []
    for shape in decode_bench.SHAPES:
        release()
        found = decode_bench.measure(
            shape,
            decode_bench.draw(shape),
            contenders,
            copy,
            stopwatch.milliseconds,
            host_microseconds,
        )
        print("\n".join(map(decode_bench.line, found)), flush=True)
        results += found
        if options.json is not None:
            known = machine(gpu.name) | {"left_out": left_out}
            write(options.json, decode_bench.to_json(results, known, copy))


def drawn(gpu: Device, workload: Workload) -> list[Inputs]:
    """Return random inputs, as many as it takes to find none of them in the cache."""
    return [draw(workload) for _ in range(copies_beyond(gpu.l2_cache, workload))]


def chosen(names: Sequence[str]) -> list[Contender]:
    """Return the peers of these names, in the order of `PEERS`."""
    return [peer for name, peer in PEERS.items() if name in names or "all" in names]


def present(contenders: Sequence[Contender]) -> tuple[list[Contender], dict[str, str]]:
    """Return who can run here, and for everybody else the reason."""
    reasons = {each.name: each.available() for each in contenders}
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    return [each for each in contenders if each.name not in left_out], left_out


def tell_left_out(reasons: Mapping[str, str]) -> None:
    """Say who does not take part, and why."""
    for name, reason in reasons.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)


def copies_beyond(cache: int, workload: Workload) -> int:
    """Return how many inputs to rotate so that each is read from memory, not from the L2 cache."""
    rows = workload.seqlen_q * workload.num_heads + 2 * workload.seqlen_k * workload.num_heads_kv
    size = workload.batch * rows * workload.head_dim * workload.itemsize
    return min(_MOST_COPIES, 1 if size > cache else ceil(2 * cache / size))


def machine(device: str) -> dict[str, Any]:
    """Return where, when, with what and how these figures came to be."""
    driver = require_cupy().cuda.runtime.driverGetVersion()
    return {
        "device": device,
        "driver_cuda": f"{driver // 1000}.{driver % 1000 // 10}",
        "versions": {"cupyflash": cupyflash.__version__} | versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python -m cupyflash", *sys.argv[1:]]),
    }


def versions() -> dict[str, str]:
    """Return the installed versions of what takes part."""
    installed = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    return {name: installed[name] for name in _DISTRIBUTIONS if name in installed}


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _ceiling(tflops: float | None) -> str:
    return "the ceiling" if tflops is None else f"{tflops:.0f} (product of 8192^3)"
