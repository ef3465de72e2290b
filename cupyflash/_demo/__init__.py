"""What `python -m cupyflash demo` runs: sentence embeddings, or a long random sequence."""
