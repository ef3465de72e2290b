"""Warnings that are given once a process."""

from __future__ import annotations

import threading
import warnings

__all__ = ["warn_once"]

_given: set[str] = set()
_guard = threading.Lock()


def warn_once(topic: str, text: str) -> None:
    """Give a `RuntimeWarning`, the first time of its topic, at the place of the caller's caller."""
    with _guard:
        if topic in _given:
            return
        _given.add(topic)
    warnings.warn(text, RuntimeWarning, stacklevel=4)
