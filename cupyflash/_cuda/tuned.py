"""Tilings that ``python -m cupyflash bench --tune`` found to be the fastest, remembered on disk.

One small file a kind of call in the folder of the kernel cache, so that processes that tune at the
same time lose nothing of each other. Its name is a digest of the kind: GPU, engine, direction,
dtype, head dims, features, rough lengths, and how far the call fills the GPU. It holds a digest of
the sources that plan and compute, and is not used once they have changed.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache as cached
from pathlib import Path
from typing import Any, TypeAlias

from cupyflash._cuda import cache
from cupyflash._cuda.device import Device
from cupyflash._cuda.source import kernels_root
from cupyflash._cuda.tiles_mma import MmaBackwardTile, MmaForwardTile
from cupyflash._cuda.tiles_wgmma import WgmmaTile
from cupyflash._cuda.tiles_wgmma_backward import WgmmaBackwardTile
from cupyflash._cuda.warn import warn_once
from cupyflash._problem import Problem
from cupyflash.tiling import Tiling

__all__ = ["Tile", "entries", "find", "forget", "remember"]

Tile: TypeAlias = Tiling | MmaForwardTile | MmaBackwardTile | WgmmaTile | WgmmaBackwardTile

_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Tiling, MmaForwardTile, MmaBackwardTile, WgmmaTile, WgmmaBackwardTile)
}
_ROWS = 128  # of a typical tile
_FULL = 3  # bits of the number of tiles a multiprocessor has: four and more are all alike


def find(engine: str, direction: str, problem: Problem, device: Device) -> Tile | None:
    """Return what is remembered for calls like this one, if anything is.

    Parameters
    ----------
    engine : str
        A key of `engines.PLANNERS`.
    direction : "forward" or "backward"
    problem, device : Problem, Device
        What is asked, and of which GPU.

    Warns
    -----
    RuntimeWarning
        Once a process: a file cannot be read.
    """
    file = _file(engine, direction, problem, device)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        kind, sizes = content["kind"], content["sizes"]
        if content["digest"] != _digest(kind, sizes):
            return None
        tile: Tile = _KINDS[kind](**sizes)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        _warn(f"{file} cannot be read ({error!r}) and is ignored")
        return None
    return tile


def remember(engine: str, direction: str, problem: Problem, device: Device, tile: Tile) -> bool:
    """Keep a tile for calls like this one, in processes that start from now on.

    Returns
    -------
    bool
        Whether it could be stored; if not, there is a `RuntimeWarning`, once a process.
    """
    file = _file(engine, direction, problem, device)
    kind, sizes = type(tile).__name__, _sizes(tile)
    content = {
        "kind": kind,
        "sizes": sizes,
        "digest": _digest(kind, sizes),
        "for": f"{device.name}, {engine}, {direction}, {problem}",  # for human readers
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        cache.replace(file, (json.dumps(content, indent=1) + "\n").encode())
    except OSError as error:
        _warn(f"{file} cannot be written ({error}): nothing is remembered")
        return False
    return True


def forget(engine: str, direction: str, problem: Problem, device: Device) -> None:
    """Go back to the engine's own choice for calls like this one."""
    file = _file(engine, direction, problem, device)
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        _warn(f"{file} cannot be removed ({error})")


def entries() -> list[Path]:
    """Return the files of what is remembered, of this version or others."""
    return sorted(cache.path().glob("tuned-*.json"))


def _file(engine: str, direction: str, problem: Problem, device: Device) -> Path:
    tiles = problem.batch * problem.num_heads * -(-problem.seqlen_q // _ROWS)
    values = (
        device.name, device.compute_capability, device.multiprocessors,
        engine, direction, problem.dtype, problem.head_dim, problem.head_dim_v,
        sorted(problem.features), problem.num_heads == problem.num_heads_kv,
        _octave(problem.seqlen_q), _octave(problem.seqlen_k),
        min(_FULL, (tiles // device.multiprocessors).bit_length()),
        _busy(problem.batch * problem.num_heads_kv, device.multiprocessors),
    )  # fmt: skip
    return cache.path() / f"tuned-{cache.key_of(map(repr, values))}.json"


def _busy(heads: int, multiprocessors: int) -> int:
    """Return in tenths how much of the GPU blocks with a key-value head each would keep busy."""
    return 10 * heads // max(1, -(-heads // multiprocessors) * multiprocessors)


def _octave(seqlen: int) -> int:
    """Return the exponent of the power of 2 that a length is rounded up to."""
    return max(0, seqlen - 1).bit_length()


def _sizes(tile: Tile) -> dict[str, int]:
    return {name: value for name, value in asdict(tile).items() if name != "origin"}


def _digest(kind: str, sizes: dict[str, int]) -> str:
    return cache.key_of((_sources(), kind, json.dumps(sizes, sort_keys=True)))


@cached
def _sources() -> str:
    """Return a digest of all that decides what a tile means and how fast it is."""
    files = [*Path(__file__).parent.glob("*.py"), *kernels_root().rglob("*.cuh")]
    return cache.key_of(file.read_text(encoding="utf-8") for file in sorted(files))


def _warn(text: str) -> None:
    warn_once("tuned", f"{text}. `python -m cupyflash clear-cache` removes what is remembered.")
