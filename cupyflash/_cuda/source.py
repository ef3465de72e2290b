"""Kernel sources: where ``kernels/`` is, and which of its headers a stub reaches."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path, PurePosixPath

__all__ = ["include_closure", "kernels_root", "read_header"]

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


def kernels_root() -> Path:
    """Return the folder of the CUDA sources: in the wheel, else beside the checkout's package."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "kernels"
    return installed if installed.is_dir() else package.parent / "kernels"


def include_closure(stub: str, root: Path | None = None) -> dict[str, str]:
    """Return the headers that a stub reaches through ``#include "..."``, directly or not.

    Parameters
    ----------
    stub : str
        CUDA source.
    root : Path, optional
        Folder that include names are relative to. Default: `kernels_root()`.

    Returns
    -------
    dict of str to str
        Name as written in the include -> text, sorted by name. A name without a file is left out:
        the compiler then reports it together with the line that wants it.
    """
    root = kernels_root() if root is None else root
    found: dict[str, str] = {}
    waiting = _INCLUDE.findall(stub)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        text = read_header(root, name)
        if text is not None:
            found[name] = text
            waiting += _INCLUDE.findall(text)
    return dict(sorted(found.items()))


@cache
def read_header(root: Path, name: str) -> str | None:
    """Return the text of one header, or None where there is no such file under `root`.

    Each file is read once in the life of a process, so that all kernels of one run come from the
    same sources; an edit is seen by the next process (or after ``read_header.cache_clear()``).
    """
    if ".." in PurePosixPath(name).parts or not (root / name).is_file():
        return None
    return (root / name).read_text(encoding="utf-8")
