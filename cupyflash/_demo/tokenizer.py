"""BERT's uncased WordPiece tokenizer, read from a ``tokenizer.json``."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Tokenizer"]

# The blocks that BERT calls Chinese characters: each becomes a word of its own.
CJK_RANGES = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)
ASCII_PUNCTUATION = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


class Tokenizer:
    """Text to token numbers, as the ``tokenizers`` library does it for BERT uncased.

    Parameters
    ----------
    path : Path
        A ``tokenizer.json`` whose model is WordPiece.
    """

    def __init__(self, path: Path) -> None:
        content = json.loads(path.read_text(encoding="utf-8"))
        model = content["model"]
        self.vocabulary: dict[str, int] = model["vocab"]
        self.prefix: str = model["continuing_subword_prefix"]
        self.longest_word: int = model["max_input_chars_per_word"]
        self.unknown = self.vocabulary[model["unk_token"]]
        self.first = self.vocabulary["[CLS]"]
        self.last = self.vocabulary["[SEP]"]
        # Special tokens written out in the text are taken whole, before any normalisation.
        self.special = {token["content"]: token["id"] for token in content["added_tokens"]}
        self.special_pattern = re.compile(f"({'|'.join(map(re.escape, self.special))})")

    def encode(self, text: str, max_length: int = 256) -> list[int]:
        """Token numbers of `text` between [CLS] and [SEP], at most `max_length` of them."""
        tokens: list[int] = []
        for part in self.special_pattern.split(text):
            if part in self.special:
                tokens.append(self.special[part])
                continue
            for word in split_words(normalize(part)):
                tokens += self.split_word(word)
        return [self.first, *tokens[: max_length - 2], self.last]

    def split_word(self, word: str) -> list[int]:
        """Greedy longest match from the left; a word with no full cover is one unknown token."""
        if len(word) > self.longest_word:
            return [self.unknown]
        pieces: list[int] = []
        start = 0
        while start < len(word):
            prefix = self.prefix if start else ""
            for end in range(len(word), start, -1):
                piece = self.vocabulary.get(prefix + word[start:end])
                if piece is not None:
                    break
            else:
                return [self.unknown]
            pieces.append(piece)
            start = end
        return pieces


def normalize(text: str) -> str:
    """Drop control characters, set CJK characters apart, strip accents, lower the case."""
    text = "".join(map(clean_character, text))
    decomposed = unicodedata.normalize("NFD", text)
    # Character by character: str.lower would look at the neighbours (the Greek final sigma).
    return "".join(c.lower() for c in decomposed if unicodedata.category(c) != "Mn")


def clean_character(character: str) -> str:
    category = unicodedata.category(character)
    if character in "\t\n\r" or category.startswith("Z"):
        return " "
    # Controls, formats and private use; what Unicode has not assigned yet stays.
    if category in ("Cc", "Cf", "Co") or character == "\ufffd":
        return ""
    if any(low <= ord(character) <= high for low, high in CJK_RANGES):
        return f" {character} "
    return character


def split_words(text: str) -> Iterator[str]:
    """Words between spaces; every punctuation character is a word of its own."""
    for chunk in text.split():
        start = 0
        for index, character in enumerate(chunk):
            if is_punctuation(character):
                if start < index:
                    yield chunk[start:index]
                yield character
                start = index + 1
        if start < len(chunk):
            yield chunk[start:]


def is_punctuation(character: str) -> bool:
    return character in ASCII_PUNCTUATION or unicodedata.category(character).startswith("P")
