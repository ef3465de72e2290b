"""A progress bar on a terminal where tqdm is installed, else plain lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator
from typing import TypeVar

__all__ = ["progress"]

Item = TypeVar("Item")


def progress(items: Collection[Item], title: str, every: float = 2.0) -> Iterator[Item]:
    """Yield `items`, showing on standard error how far the loop has come.

    Plain lines come at most every `every` seconds, so short loops stay silent.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = None
    if tqdm is not None and sys.stderr.isatty():
        yield from tqdm(items, desc=title, leave=False)
    else:
        yield from plain_lines(items, title, every)


def plain_lines(items: Collection[Item], title: str, every: float) -> Iterator[Item]:
    shown = time.monotonic()
    for count, item in enumerate(items):
        if time.monotonic() - shown >= every:
            shown = time.monotonic()
            print(f"{title}: {count} of {len(items)}", file=sys.stderr, flush=True)
        yield item
