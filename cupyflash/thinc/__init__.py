"""Layers for thinc and encoders for spaCy; runs on NumpyOps and CupyOps.

thinc finds them by name (``@layers = "cupyflash.MultiHeadAttention.v1"``), and so does spaCy
(``@architectures = "cupyflash.TransformerEncoder.v1"``), through the package's entry points.
"""

from cupyflash.thinc.attention import FlashAttention
from cupyflash.thinc.encoder import MultiHeadAttention, TransformerEncoder

__all__ = ["FlashAttention", "MultiHeadAttention", "TransformerEncoder"]
