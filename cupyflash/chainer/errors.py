"""What the core says of bad arguments, as Chainer's own error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from chainer.utils import type_check

__all__ = ["invalid_type"]


@contextmanager
def invalid_type(where: str) -> Iterator[None]:
    """Turn TypeError and ValueError into Chainer's `InvalidType`, with the same words."""
    try:
        yield
    except (TypeError, ValueError) as error:
        message = f"Invalid operation is performed in: {where} (Forward)\n\n{error}"
        raise type_check.InvalidType(None, None, message) from error
