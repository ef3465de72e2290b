"""Exact attention for Chainer 7.8.1: a differentiable function and two links.

Importing this package also lets Chainer itself run beside NumPy 2 and CuPy 14, where it cannot be
imported alone: import it first, and then Chainer as usual. See `import_guard`.
"""

from cupyflash.chainer import import_guard

import_guard.install()

from cupyflash.chainer.function import flash_attention  # noqa: E402
from cupyflash.chainer.link import FlashAttention  # noqa: E402
from cupyflash.chainer.multi_head import MultiHeadAttention  # noqa: E402

__all__ = ["FlashAttention", "MultiHeadAttention", "flash_attention"]
