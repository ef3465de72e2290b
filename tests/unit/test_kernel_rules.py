"""House rules of `kernels/`: layers, sizes, where assembly may stand, no machine's paths."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cupyflash._cuda.source import kernels_root

ROOT = kernels_root()
HEADERS = sorted(ROOT.rglob("*.cuh"))
# A file includes its own layer and those before it; the last three do not know each other.
LAYERS = {"common": 0, "arch": 1, "tile": 2, "attention": 3}
LAYERS |= dict.fromkeys(("forward", "backward", "decode"), 4)
MOST_LINES = 400


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def layer_of(name: str) -> str:
    return name.split("/")[0]


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+["<]([^">]+)[">]', path.read_text(), re.MULTILINE)


def test_there_are_kernels() -> None:
    assert {layer_of(name_of(path)) for path in HEADERS} == set(LAYERS)


@pytest.mark.parametrize("path", HEADERS, ids=name_of)
def test_includes_go_down_the_layers(path: Path) -> None:
    own = layer_of(name_of(path))
    for name in includes(path):
        assert (ROOT / name).is_file(), f"{name} is not one of ours"
        other = layer_of(name)
        assert other == own or LAYERS[other] < LAYERS[own], f"{name_of(path)} includes {name}"


def test_no_circular_includes() -> None:
    finished: set[str] = set()

    def visit(name: str, chain: tuple[str, ...]) -> None:
        assert name not in chain, f"circular: {chain}"
        if name not in finished:
            for other in includes(ROOT / name):
                visit(other, (*chain, name))
            finished.add(name)

    for path in HEADERS:
        visit(name_of(path), ())


@pytest.mark.parametrize("path", HEADERS, ids=name_of)
def test_one_header(path: Path) -> None:
    text = path.read_text()
    name = name_of(path)
    assert len(text.splitlines()) <= MOST_LINES
    assert max(map(len, text.splitlines())) <= 100
    assert text.startswith("// "), "a file says first what it is for"
    assert "#pragma once" in text
    assert "#define" not in text
    assert text.isascii()
    if layer_of(name) != "arch":
        assert not re.search(r"\basm\b", text)
    assert not re.search(r"/(home|root|tmp|usr|opt|work)/", text)
