"""The demo on real input: which sentences mean nearly the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cupyflash._demo.attention import dense_attention, packed_attention, padded_attention
from cupyflash._demo.device import engine_name, timed, to_host
from cupyflash._demo.minilm import MiniLM
from cupyflash.errors import UnsupportedError

__all__ = ["SENTENCES", "show_sentences", "similar_pairs"]

Array = Any

SENTENCES = (
    "A storm is moving in from the sea tonight.",
    "The attention of a language model compares each word with all others.",
    "How do I reset the password of my account?",
    "She has played the violin since she was five.",
    "The central bank left interest rates unchanged.",
    "The train to the coast was delayed by an hour.",
    "Knead the dough, then let it rise until it has doubled in size.",
    "A small dog chased the cat across the garden.",
    "Our railway journey to the seaside took sixty minutes longer than planned.",
    "I can't log in because I forgot my passphrase.",
    "Heavy rain and wind will arrive from the ocean this evening.",
    "Borrowing costs stay the same, monetary policymakers decided.",
    "The kitten ran away from a puppy on the lawn.",
    "From early childhood on she practised a string instrument.",
    "In a transformer every token looks at every other token of the text.",
    "Bread needs time to prove before it goes into the oven.",
)


def show_sentences(xp: Any, folder: Path) -> None:
    """Print which sentences are alike, and the checks against dense attention."""
    model = MiniLM(folder, xp)
    num_tokens = sum(len(model.tokenizer.encode(sentence)) for sentence in SENTENCES)
    print(f"model     all-MiniLM-L6-v2: {model.num_layers} layers, {model.num_heads} heads")
    print(f"input     {len(SENTENCES)} sentences, {num_tokens} tokens, packed without padding\n")

    for attention in (packed_attention, dense_attention):
        model.embed(SENTENCES, attention)  # kernels are compiled when first needed
    embeddings, seconds = timed(xp, lambda: model.embed(SENTENCES, packed_attention))
    dense, dense_seconds = timed(xp, lambda: model.embed(SENTENCES, dense_attention))
    print("similarity of each sentence and the one nearest to it")
    for similarity, first, second in similar_pairs(embeddings):
        print(f"    {similarity:.2f}  {SENTENCES[first]}\n          {SENTENCES[second]}")

    print(f"\ntime      {seconds * 1e3:.1f} ms; with dense attention {dense_seconds * 1e3:.1f} ms")
    print("          (short sentences: calls cost more than attention; long input follows)")
    print("check     largest difference of the embeddings from those with dense attention")
    print(f"          packed, cu_seqlens    {float(abs(embeddings - dense).max()):.1e}")
    try:
        padded = model.embed(SENTENCES, padded_attention)
    except UnsupportedError:
        print(f"          padded, bool mask     (the engine {engine_name(xp)} takes no mask)")
    else:
        print(f"          padded, bool mask     {float(abs(padded - dense).max()):.1e}")


def similar_pairs(embeddings: Array) -> list[tuple[float, int, int]]:
    """Each unit vector with the one nearest to it, as ``(cosine, row, row)``, best first."""
    embeddings = to_host(embeddings)
    similarity = embeddings @ embeddings.T
    np.fill_diagonal(similarity, -np.inf)
    pairs = {(min(pair), max(pair)) for pair in enumerate(similarity.argmax(axis=1).tolist())}
    return sorted(((float(similarity[pair]), *pair) for pair in pairs), reverse=True)
