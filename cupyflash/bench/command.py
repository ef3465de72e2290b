"""``python -m cupyflash bench``: ours and every installed peer, side by side on this GPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any

import cupyflash
from cupyflash._arrays import Place
from cupyflash._cuda.cache import path
from cupyflash._cuda.device import Device, current, require_cupy
from cupyflash._cuda.engines import PLANNERS
from cupyflash._engines import select
from cupyflash.bench import decode as decode_bench
from cupyflash.bench import features as feature_bench
from cupyflash.bench import flex_peer, report
from cupyflash.bench.inputs import Inputs, draw
from cupyflash.bench.peers import PEERS, Contender, Ours
from cupyflash.bench.runner import Result, Stopwatch, race
from cupyflash.bench.timing import device_milliseconds, extra_bytes, host_microseconds, release
from cupyflash.bench.torch_peers import ceiling_tflops
from cupyflash.bench.tune import problem_of, tune_tiles
from cupyflash.bench.workloads import (
    DIRECTIONS,
    HEAD_DIMS,
    MASKS,
    SEQLENS,
    Shape,
    Workload,
    grid,
    of_shapes,
    parse_shape,
)
from cupyflash.errors import UnsupportedError

__all__ = ["add_arguments", "bench"]

_DISTRIBUTIONS = (
    "numpy", "cupy-cuda12x", "cupy-cuda13x", "torch", "tokenspeed-fa3",
    "dew-flash-attn-cu13", "flash-attn-4", "nvidia-cudnn-frontend",
)  # fmt: skip
_MOST_COPIES = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    add = partial(parser.add_argument, nargs="+", metavar="N", type=_positive)
    add("--head-dims", default=HEAD_DIMS, help="of the grid; default: 64 128 256")
    add("--seqlens", default=SEQLENS, help="of the grid; default: 512 to 16384")
    add(
        "--shapes",
        type=parse_shape,
        metavar="b,s,h,d[,hk]",
        help="in place of the grid of 16384 tokens, 2048 / head_dim heads",
    )
    add(
        "--directions",
        type=str,
        choices=DIRECTIONS,
        default=DIRECTIONS,
        metavar="DIRECTION",
        help="default: forward backward",
    )
    add("--masks", type=str, choices=MASKS, default=MASKS, help="default: full causal")
    parser.add_argument(
        "--dtype",
        choices=("float16", "bfloat16", "float32", "float8_e4m3fn"),
        default="bfloat16",
        help="default: bfloat16; float8_e4m3fn: forward only",
    )
    parser.add_argument("--engine", choices=tuple(PLANNERS), help="ours; default: the fastest")
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=("all", *PEERS, flex_peer.NAME),
        default=["all"],
        metavar="PEER",
        help=f"default: all, which are {', '.join(PEERS)}, with --features {flex_peer.NAME};"
        " what is not installed is left out",
    )
    parser.add_argument("--rounds", type=_positive, default=5, help="turns of each; default: 5")
    parser.add_argument(
        "--json", dest="json_path", type=Path, metavar="PATH", help="write every figure there"
    )
    parser.add_argument(
        "--plot",
        dest="plot_path",
        type=Path,
        metavar="PATH.png",
        help="draw PATH-forward.png, PATH-backward.png",
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="time our legal tiles in place of peers; later calls on this GPU use the fastest",
    )
    parser.add_argument(
        "--features",
        action="store_true",
        help=f"time our features beside the call without them, and beside {flex_peer.NAME},"
        " PyTorch's FlexAttention",
    )
    parser.add_argument(
        "--decode",
        action="store_true",
        help="time one query against long caches, contiguous and paged, beside fa3 and torch-flash",
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def bench(
    shapes: Sequence[Shape] | None,
    directions: Sequence[str],
    dtype: str,
    engine: str | None,
    peers: Sequence[str],
    json_path: Path | None,
    plot_path: Path | None,
    head_dims: Sequence[int],
    seqlens: Sequence[int],
    masks: Sequence[str],
    rounds: int,
    tune: bool,
    features: bool,
    decode: bool,
) -> None:
    """Time everybody on every workload and print a row as soon as it is known.

    Raises
    ------
    NoDeviceError
        There is no GPU.
    """
    if tune and (json_path or plot_path):
        sys.exit("cupyflash: --tune prints a table and remembers; it has no --json and no --plot")
    if flex_peer.NAME in peers and not features:
        sys.exit(f"cupyflash: {flex_peer.NAME} takes part in --features alone")
    if plot_path is not None and find_spec("matplotlib") is None:
        sys.exit("cupyflash: --plot needs matplotlib: pip install matplotlib")
    if dtype == "float8_e4m3fn":  # no backward, and no tiles to remember
        if tune or features:
            sys.exit("cupyflash: --tune and --features know no float8_e4m3fn")
        directions = [each for each in directions if each == "forward"]
    gpu = current()
    every = of_shapes(shapes, dtype) if shapes else grid(head_dims, seqlens, dtype)
    workloads = [each for each in every if each.mask in masks]
    stopwatch = Stopwatch(partial(device_milliseconds, rounds=rounds), extra_bytes)
    if decode:
        time_decoding(peers, gpu, stopwatch, json_path)
        return
    if tune:
        tune_all(workloads, directions, engine, gpu, stopwatch)
        return
    if features:
        time_features(workloads, directions, engine, peers, gpu, stopwatch, json_path)
        return
    contenders, left_out = present([Ours(engine), *chosen(peers)])
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)
    names = [each.name for each in contenders]
    ceiling = None if dtype == "float32" else ceiling_tflops(device_milliseconds)
    known = machine(gpu.name) | {"left_out": left_out, "dtype": dtype, "rounds": rounds}
    print(f"{gpu.name}: {dtype}, TFLOP/s; ratio, share of {_ceiling(ceiling)} and memory are ours")
    print(report.header(names))
    results: list[Result] = []
    for workload in workloads:
        copies = drawn(gpu, workload)
        for direction in directions:
            found = race(workload, direction, contenders, copies, stopwatch)
            print(report.lines(found, names, ceiling, results), flush=True)
            results += found
            release()
        if json_path is not None:  # every time, as a long run may be cut short
            write(json_path, report.to_json(results, known, ceiling))
    if plot_path is not None:
        for direction in directions:
            path = plot_path.with_name(f"{plot_path.stem}-{direction}{plot_path.suffix or '.png'}")
            title = f"{gpu.name}, {dtype}, {known['date'][:10]}"
            report.figure(results, direction, title).savefig(path, dpi=110)
            print(f"plot: {path}")


def tune_all(
    workloads: Sequence[Workload],
    directions: Sequence[str],
    engine: str | None,
    gpu: Device,
    stopwatch: Stopwatch,
) -> None:
    """Tune the tiles of one engine, by default the fastest that serves the workload, for each."""
    print(f"{gpu.name}: a speed-up is the default's time over a tile's; kept in {path()}")
    for workload in workloads:
        try:
            serving = select(problem_of(workload), Place(gpu.id), engine)
        except UnsupportedError as error:
            print(f"{workload.name}: {error}", file=sys.stderr)
            continue
        copies = drawn(gpu, workload)
        for direction in directions:
            print(tune_tiles(workload, direction, serving, gpu, copies, stopwatch), flush=True)
            release()


def time_features(
    workloads: Sequence[Workload],
    directions: Sequence[str],
    engine: str | None,
    peers: Sequence[str],
    gpu: Device,
    stopwatch: Stopwatch,
    json_path: Path | None,
) -> None:
    """Time every feature beside the same call without it; torch-flex too, if it is wanted."""
    wanted = "all" in peers or flex_peer.NAME in peers
    missing = flex_peer.missing() if wanted else "not asked for"
    if missing:
        print(f"left out: {flex_peer.NAME}: {missing}", file=sys.stderr)
    results: list[feature_bench.FeatureResult] = []
    for workload in workloads:
        print(f"{gpu.name}: {workload.name}, {workload.dtype}\n{feature_bench.header()}")
        inputs = draw(workload)
        for direction in directions:
            found = feature_bench.measure(
                workload, direction, inputs, engine, not missing, stopwatch.milliseconds
            )
            print("\n".join(map(feature_bench.line, found)), flush=True)
            results += found
            release()
        if json_path is not None:
            write(json_path, feature_bench.to_json(results, machine(gpu.name)))


def time_decoding(
    peers: Sequence[str], gpu: Device, stopwatch: Stopwatch, json_path: Path | None
) -> None:
    """Time a step of generation at every shape of `decode.SHAPES`."""
    contenders, left_out = decode_bench.present(bool(peers))
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)
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
        if json_path is not None:
            known = machine(gpu.name) | {"left_out": left_out}
            write(json_path, decode_bench.to_json(results, known, copy))


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
