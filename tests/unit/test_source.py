"""Which headers a stub reaches."""

from pathlib import Path

import pytest

from cupyflash._cuda import source


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "types.cuh").write_text("// types\n")
    (tmp_path / "common" / "unused.cuh").write_text("// unused\n")
    (tmp_path / "tile.cuh").write_text('#pragma once\n  # include "common/types.cuh"\n')
    return tmp_path


def test_closure_holds_what_is_reached_and_nothing_else(root: Path) -> None:
    closure = source.include_closure('#include "tile.cuh"\n', root)
    assert list(closure) == ["common/types.cuh", "tile.cuh"]
    assert closure["common/types.cuh"] == "// types\n"


def test_circular_includes_end(root: Path) -> None:
    (root / "a.cuh").write_text('#pragma once\n#include "b.cuh"\n')
    (root / "b.cuh").write_text('#pragma once\n#include "a.cuh"\n')
    assert list(source.include_closure('#include "a.cuh"', root)) == ["a.cuh", "b.cuh"]


@pytest.mark.parametrize("name", ["missing.cuh", "../outside.cuh", "common"])
def test_what_is_no_header_under_the_root_is_left_to_the_compiler(root: Path, name: str) -> None:
    (root.parent / "outside.cuh").write_text("// outside\n")
    assert source.include_closure(f'#include "{name}"\n', root) == {}


def test_angle_brackets_and_comments_are_not_followed(root: Path) -> None:
    assert source.include_closure('#include <tile.cuh>\n// #include "tile.cuh"\n', root) == {}


def test_a_header_is_read_once_in_a_process(root: Path) -> None:
    source.include_closure('#include "tile.cuh"\n', root)
    (root / "common" / "types.cuh").write_text("// edited\n")
    assert source.read_header(root, "common/types.cuh") == "// types\n"
    source.read_header.cache_clear()
    assert source.read_header(root, "common/types.cuh") == "// edited\n"


def test_the_checkout_has_its_kernels_beside_the_package() -> None:
    assert source.kernels_root().name == "kernels"
    assert source.kernels_root().is_dir()
