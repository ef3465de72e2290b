"""The options of ``python -m cupyflash bench``: each that is accepted is honoured."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from cupyflash._cuda.engines import PLANNERS
from cupyflash.bench import decode, flex_peer, report
from cupyflash.bench.peers import PEERS
from cupyflash.bench.workloads import (
    DIRECTIONS,
    HEAD_DIMS,
    MASKS,
    SEQLENS,
    Shape,
    Workload,
    grid,
    of_shapes,
    parse_head_dim,
    parse_positive,
    parse_shape,
)

__all__ = ["Options", "add_arguments", "refuse_ignored"]

FLOAT8 = "float8_e4m3fn"
_DEFAULTS: dict[str, Any] = {
    "head_dims": HEAD_DIMS,
    "seqlens": SEQLENS,
    "directions": DIRECTIONS,
    "masks": MASKS,
    "dtype": "bfloat16",
    "peers": ("all",),
}
_ALL_PEERS = (*PEERS, flex_peer.NAME)
_DECODE_PEERS = tuple(each.name for each in decode.PEERS)
_WITHOUT_FEATURES = "bench without --features"
# Who is asked for what stands on the left would not look at what stands on the right.
_NOT_TAKEN = {
    "--decode": (
        "--tune", "--features", "--shapes", "--head-dims", "--seqlens", "--directions", "--masks",
        "--dtype", "--engine", "--plot",
        *(f"--peers {name}" for name in _ALL_PEERS if name not in _DECODE_PEERS),
    ),
    "--features": ("--tune", "--plot", *(f"--peers {name}" for name in PEERS)),
    _WITHOUT_FEATURES: (f"--peers {flex_peer.NAME}",),
    "--tune": ("--peers", "--json", "--plot"),
    "--shapes": ("--head-dims", "--seqlens"),
    f"--dtype {FLOAT8}": ("--tune", "--features", "--directions backward"),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; None, False: not given."""
    add = partial(parser.add_argument, nargs="+", metavar="N")
    add("--head-dims", type=parse_head_dim, help="of the grid; default: 64 128 256")
    add("--seqlens", type=parse_positive, help="of the grid; default: 512 to 16384")
    add(
        "--shapes",
        type=parse_shape,
        metavar="b,s,h,d[,hk]",
        help="in place of the grid of 16384 tokens, 2048 / head_dim heads",
    )
    add(
        "--directions",
        choices=DIRECTIONS,
        metavar="DIRECTION",
        help="default: forward backward",
    )
    add("--masks", choices=MASKS, metavar="MASK", help="full, causal; default: both")
    parser.add_argument(
        "--dtype",
        choices=("float16", "bfloat16", "float32", FLOAT8),
        help=f"default: bfloat16; {FLOAT8}: forward only",
    )
    parser.add_argument("--engine", choices=tuple(PLANNERS), help="ours; default: the fastest")
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=("all", *_ALL_PEERS),
        metavar="PEER",
        help=f"default: all, which are {', '.join(PEERS)}, with --features {flex_peer.NAME},"
        f" with --decode {', '.join(_DECODE_PEERS)}; what is not installed is left out",
    )
    parser.add_argument(
        "--rounds", type=parse_positive, default=5, help="turns of each; default: 5"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every figure there")
    parser.add_argument(
        "--plot",
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


@dataclass(frozen=True)
class Options:
    """What is to be timed, how, and where the figures go; named as the options are."""

    shapes: Sequence[Shape] | None
    head_dims: Sequence[int]
    seqlens: Sequence[int]
    directions: Sequence[str]
    masks: Sequence[str]
    dtype: str
    engine: str | None
    peers: Sequence[str]
    rounds: int
    json: Path | None
    plot: Path | None
    tune: bool
    features: bool
    decode: bool

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Fill in the defaults; ends with one line if something given cannot be honoured."""
        refuse_ignored(given)
        chosen: dict[str, Any] = {
            name: _DEFAULTS.get(name) if value is None else value for name, value in given.items()
        }
        if chosen["dtype"] == FLOAT8:
            chosen["directions"] = DIRECTIONS[:1]
        options = cls(**chosen)
        if options.json is not None:
            _refuse_unwritable(options.json)
        if options.plot is not None:
            if options.plot.is_dir():  # which is no name to add directions to
                sys.exit(f"cupyflash: {options.plot} cannot be written: Is a directory")
            for path in options.plots.values():
                _refuse_unwritable(path)
            _refuse_format(options.plot)
        return options

    @property
    def workloads(self) -> list[Workload]:
        """The shapes, or the grid, with the masks that are wanted."""
        shapes = of_shapes(self.shapes, self.dtype) if self.shapes else None
        every = shapes or grid(self.head_dims, self.seqlens, self.dtype)
        return [each for each in every if each.mask in self.masks]

    @property
    def plots(self) -> dict[str, Path]:
        """The file of each direction; none if none is wanted."""
        if self.plot is None:
            return {}
        stem, suffix = self.plot.stem, self.plot.suffix or ".png"
        return {each: self.plot.with_name(f"{stem}-{each}{suffix}") for each in self.directions}


def refuse_ignored(given: Mapping[str, Any]) -> None:
    """End with one line if something is given beside what does not look at it."""
    words = set(_words(given))
    for asked, not_taken in _NOT_TAKEN.items():
        ignored = [each for each in not_taken if each in words]
        if asked in words and ignored:
            sys.exit(f"cupyflash: leave out {' '.join(ignored)}, which {asked} does not take")


def _words(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield each option that is given, alone and with each of its values."""
    if not given["features"]:
        yield _WITHOUT_FEATURES
    for name, value in given.items():
        if value is None or value is False:
            continue
        option = f"--{name.replace('_', '-')}"
        yield option
        for each in value if isinstance(value, list) else [value]:
            yield f"{option} {each}"


def _refuse_format(plot: Path) -> None:
    """Try to draw, as what is drawn comes last."""
    suffix = plot.suffix or ".png"
    try:
        report.figure([], DIRECTIONS[0], "").savefig(BytesIO(), format=suffix[1:])
    except Exception as error:  # whatever says that a format, or what writes it, is missing
        if isinstance(error, ImportError) and str(error.name).startswith("matplotlib"):
            sys.exit("cupyflash: --plot needs matplotlib: pip install matplotlib")
        sys.exit(f"cupyflash: --plot {plot}: {' '.join(str(error).split())}")


def _refuse_unwritable(path: Path) -> None:
    """Try to open, which neither leaves a new file nor changes one that is there."""
    try:
        there = path.exists()
        path.open("a").close()
        if not there:
            path.resolve().unlink()  # of a link, what it points to
    except OSError as error:
        sys.exit(f"cupyflash: {path} cannot be written: {error.strerror}")
