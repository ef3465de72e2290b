"""Layers for thinc and encoders for spaCy; runs on NumpyOps and CupyOps.

thinc finds them by name (``@layers = "cupyflash.MultiHeadAttention.v1"``), and so does spaCy
(``@architectures = "cupyflash.TransformerEncoder.v1"``), through the package's entry points.
"""

try:
    import thinc  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error}: pip install 'cupyflash[thinc]'", name=error.name
    ) from error

from cupyflash.thinc.attention import FlashAttention
from cupyflash.thinc.encoder import MultiHeadAttention, TransformerEncoder

__all__ = ["FlashAttention", "MultiHeadAttention", "TransformerEncoder"]
