"""Tokens moved bit for bit, as integers: NaNs keep their payload, and any dtype can be indexed."""

from __future__ import annotations

from typing import Any

Array = Any


def as_bits(x: Array) -> Array:
    """View floats as integers of their size."""
    return x.view(f"u{x.dtype.itemsize}")


def gathered(x: Array, *index: Array) -> Array:
    """Return a copy of ``x[index]``."""
    return as_bits(x)[index].view(x.dtype)
