"""MiniLM (BERT) sentence encoder in NumPy or CuPy, with attention by cupyflash.

Sentences are packed one after the other into ``(total_tokens, hidden)``: every layer but
attention works on single tokens, and attention gets ``cu_seqlens``. So there is no padding to
compute on or to hide.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cupyflash._demo.attention import packed_attention
from cupyflash._demo.gelu import gelu
from cupyflash._demo.tokenizer import Tokenizer
from cupyflash._demo.weights import read_safetensors

__all__ = ["MiniLM"]

Array = Any
Attention = Callable[[Array, Array, Array, Any], Array]


class MiniLM:
    """The sentence-transformers encoder all-MiniLM-L6-v2.

    Parameters
    ----------
    folder : Path
        Holds ``config.json``, ``tokenizer.json`` and ``model.safetensors``.
    xp : module
        ``numpy`` or ``cupy``: where the model runs.
    """

    def __init__(self, folder: Path, xp: Any = np) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.xp = xp
        self.tokenizer = Tokenizer(folder / "tokenizer.json")
        self.num_heads: int = config["num_attention_heads"]
        self.num_layers: int = config["num_hidden_layers"]
        self.epsilon: float = config["layer_norm_eps"]
        tensors = read_safetensors(folder / "model.safetensors")
        self.weights = {name: xp.asarray(tensor) for name, tensor in tensors.items()}

    def embed(
        self,
        sentences: Sequence[str],
        attention: Attention = packed_attention,
        *,
        batch_size: int = 32,
        progress: Callable[[Sequence[int]], Iterable[int]] = iter,
    ) -> Array:
        """Unit-length embeddings ``(len(sentences), hidden)``, float32.

        `attention` is called as ``attention(query, key, value, cu_seqlens)`` on arrays
        ``(total_tokens, num_heads, head_dim)``; see `cupyflash._demo.attention`.
        """
        tokens = [self.tokenizer.encode(sentence) for sentence in sentences]
        parts = [
            self.embed_tokens(tokens[start : start + batch_size], attention)
            for start in progress(range(0, len(tokens), batch_size))
        ]
        hidden_size = self.weights["embeddings.LayerNorm.bias"].shape[0]
        return self.xp.concatenate([self.xp.empty((0, hidden_size), "float32"), *parts])

    def embed_tokens(self, tokens: Sequence[Sequence[int]], attention: Attention) -> Array:
        """Embeddings of one batch of token lists."""
        lengths = np.array([len(entry) for entry in tokens])
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        hidden = self.encode(np.concatenate(tokens), cu_seqlens, attention)
        # Mean over each sentence's tokens, as one small product: (b, total) @ (total, hidden).
        member = np.repeat(np.arange(len(tokens)), lengths) == np.arange(len(tokens))[:, None]
        mean = self.xp.asarray((member / lengths[:, None]).astype(np.float32)) @ hidden
        return mean / self.xp.sqrt((mean * mean).sum(axis=1, keepdims=True))

    def encode(self, tokens: Array, cu_seqlens: Array, attention: Attention) -> Array:
        """Last hidden states ``(total_tokens, hidden)`` of packed sentences."""
        positions = np.arange(len(tokens)) - np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
        weights, table = self.weights, "embeddings.{}_embeddings.weight".format
        hidden = weights[table("word")][self.xp.asarray(tokens)]
        hidden = hidden + weights[table("position")][self.xp.asarray(positions)]
        hidden = self.layer_norm(hidden + weights[table("token_type")][0], "embeddings.LayerNorm")
        for index in range(self.num_layers):
            hidden = self.layer(hidden, f"encoder.layer.{index}.", cu_seqlens, attention)
        return hidden

    def layer(self, hidden: Array, name: str, cu_seqlens: Array, attention: Attention) -> Array:
        heads = (len(hidden), self.num_heads, -1)
        query, key, value = (
            self.dense(hidden, f"{name}attention.self.{part}").reshape(heads)
            for part in ("query", "key", "value")
        )
        out = attention(query, key, value, cu_seqlens).reshape(hidden.shape)
        out = self.dense(out, f"{name}attention.output.dense")
        hidden = self.layer_norm(hidden + out, f"{name}attention.output.LayerNorm")
        out = gelu(self.xp, self.dense(hidden, f"{name}intermediate.dense"))
        out = self.dense(out, f"{name}output.dense")
        return self.layer_norm(hidden + out, f"{name}output.LayerNorm")

    def dense(self, hidden: Array, name: str) -> Array:
        return hidden @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def layer_norm(self, hidden: Array, name: str) -> Array:
        centred = hidden - hidden.mean(axis=-1, keepdims=True)
        variance = (centred * centred).mean(axis=-1, keepdims=True)
        scaled = centred / self.xp.sqrt(variance + self.epsilon)
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]
