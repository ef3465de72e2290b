"""Types for argparse: what an example cannot use is refused before it begins to work."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from cupyflash.bench.workloads import parse_head_dim, parse_positive

__all__ = ["HEAD_DIM", "PLOT", "POSITIVE", "existing_file", "file_to_write", "some_text", "whole"]


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """A whole number from `low` to `high`, both included."""
    expected = f"{low} or more" if high is None else f"from {low} to {high}"

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if number < low or (high is not None and number > high):
            raise ArgumentTypeError(f"must be a whole number, {expected}, got {text!r}")
        return number

    return convert


def some_text(text: str) -> str:
    """Any text but the empty one."""
    if not text:
        raise ArgumentTypeError("is empty")
    return text


def existing_file(text: str) -> Path:
    """A file to read."""
    path = Path(text)
    if not path.is_file():
        raise ArgumentTypeError(f"there is no file {path}")
    return path


def file_to_write(*suffixes: str) -> Callable[[str], Path]:
    """A file with one of these suffixes, by default the first, in a folder that can be written."""

    def convert(text: str) -> Path:
        path = Path(text)
        if path.name and not path.suffix:
            path = path.with_suffix(suffixes[0])
        if path.suffix.lower() not in suffixes:
            raise ArgumentTypeError(f"must end in {' or '.join(suffixes)}, got {text!r}")
        if not path.parent.is_dir():
            raise ArgumentTypeError(f"there is no folder {path.parent}")
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ArgumentTypeError(f"{path} cannot be written")
        return path

    return convert


POSITIVE = parse_positive
HEAD_DIM = parse_head_dim
PLOT = file_to_write(".png", ".pdf", ".svg", ".jpg")
