"""Attention over a key-value cache: what `cupyflash.kvcache` consists of."""
