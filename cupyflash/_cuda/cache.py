"""Compiled kernels on disk: content-named, checked when read, shared by threads and processes.

Two files a kernel, written with a temporary name and then renamed: ``NAME-KEY.cu``, the stub for
human readers under a line with the cubin's digest, and ``NAME-KEY.cubin``, which cuobjdump and
nvdisasm accept. A cubin that its digest does not match is compiled anew.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from cupyflash._cuda.warn import warn_once

__all__ = [
    "Cubin",
    "clear",
    "entries",
    "fetch",
    "key_of",
    "path",
    "replace",
    "save_failed",
    "size",
]

FORMAT = "cupyflash kernel 1"  # a new number here makes every stored kernel unknown
_DIGEST_LINE = f"// {FORMAT}, sha256 of the cubin: "
# Only such names are counted or deleted: the folder may hold the user's own files too.
# The .json are tilings that `tuned` remembers.
_OURS = re.compile(r"(\w+-[0-9a-f]{40}\.(cubin|cu|json)|[0-9a-f]{32}\.partial)")


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel; ``path`` is None where it could not be stored."""

    data: bytes
    path: Path | None


_guard = threading.Lock()
_key_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
_unstored: dict[str, Cubin] = {}


def path() -> Path:
    """Return the cache folder: ``CUPYFLASH_CACHE_DIR``, else the user's cache folder."""
    if chosen := os.environ.get("CUPYFLASH_CACHE_DIR"):
        return _without_tilde(Path(chosen))
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _without_tilde(Path(base)) / "cupyflash"


def _without_tilde(folder: Path) -> Path:
    try:
        return folder.expanduser()
    except RuntimeError:  # a user without a home: nothing can be stored, which warns
        return Path(os.devnull, "cupyflash")


def entries() -> list[Path]:
    """Return the stored cubins, sorted by name."""
    return sorted(file for file in _files() if file.suffix == ".cubin")


def size() -> int:
    """Return the bytes that the cache takes on disk."""
    return sum(file.stat().st_size for file in _files())


def clear() -> int:
    """Delete what the cache has written, and return the number of cubins deleted."""
    count = len(entries())
    for file in _files():
        file.unlink(missing_ok=True)
    _unstored.clear()
    return count


def _files() -> list[Path]:
    return [file for file in path().glob("*") if _OURS.fullmatch(file.name)]


def key_of(parts: Iterable[str]) -> str:
    """Return the name of a kernel: a digest of every text that decides its code."""
    digest = hashlib.sha256(FORMAT.encode())
    for part in parts:
        text = part.encode()
        digest.update(b"%d:" % len(text))  # the length keeps ("ab", "c") apart from ("a", "bc")
        digest.update(text)
    return digest.hexdigest()[:40]


def fetch(name: str, key: str, stub: str, build: Callable[[], bytes]) -> Cubin:
    """Return the kernel called `key`, from the cache or else from `build`, which is then stored.

    Of several threads that ask for one key, one builds and the others wait. Several processes may
    build the same kernel; the last rename wins, and all files of one key are equally good.

    Parameters
    ----------
    name : str
        Readable beginning of the file names.
    key : str
        From `key_of`.
    stub : str
        Source text to keep beside the cubin.
    build : callable
        Compiles the kernel.

    Warns
    -----
    RuntimeWarning
        Once a process: the folder cannot be read or written, so kernels stay in memory.
    """
    with _guard:
        lock = _key_locks[key]
    with lock:
        if key in _unstored:
            return _unstored[key]
        file = path() / f"{name}-{key}.cubin"
        data = _read(file)
        if data is not None:
            return Cubin(data, file)
        data = build()
        cubin = Cubin(data, file if _store(file, stub, data) else None)
        if cubin.path is None:
            _unstored[key] = cubin
        return cubin


def _read(file: Path) -> bytes | None:
    """Return a stored cubin, or None where there is none that matches its digest."""
    try:
        with file.with_suffix(".cu").open(encoding="utf-8") as source:
            expected = source.readline().removeprefix(_DIGEST_LINE).strip()
        data = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return None
    except OSError as error:
        _warn(error)
        return None
    return data if hashlib.sha256(data).hexdigest() == expected else None


def _store(file: Path, stub: str, data: bytes) -> bool:
    """Write one kernel, and say whether it now lies there whole."""
    source = f"{_DIGEST_LINE}{hashlib.sha256(data).hexdigest()}\n{stub}"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace(file.with_suffix(".cu"), source.encode())
        replace(file, data)
    except OSError as error:
        if _read(file) == data:  # another process was faster; Windows then refuses the rename
            return True
        _warn(error)
        return False
    return True


def replace(file: Path, data: bytes) -> None:
    """Put a whole file in place at once, so that no reader ever sees a part of it."""
    temporary = file.with_name(f"{secrets.token_hex(16)}.partial")
    try:
        temporary.write_bytes(data)  # with the user's umask, as a cache may be shared
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def save_failed(source: str) -> Path | None:
    """Keep a source that did not compile, in the cache or else in the temporary folder."""
    name = f"failed-{key_of([source])}.cu"
    for folder in (path(), Path(tempfile.gettempdir())):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace(folder / name, source.encode())
        except OSError:
            continue
        return folder / name
    return None


def _warn(error: OSError) -> None:
    warn_once(
        "cache",
        f"the kernel cache {path()} cannot be used ({error}): kernels are compiled again in every"
        " process. Set CUPYFLASH_CACHE_DIR to a writable folder.",
    )
