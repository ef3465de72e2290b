"""The wheel holds the package, every kernel source and the typing marker; versions agree."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import cupyflash

ROOT = Path(cupyflash.__file__).parents[1]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What lies in a wheel built from this checkout, without network or build isolation."""
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("cupyflash was not imported from a checkout")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--wheel-dir", str(folder)]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    built = subprocess.run(command + options, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = folder.glob("cupyflash-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_has_every_source(names: set[str]) -> None:
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "cupyflash").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    kernels = {
        f"cupyflash/{path.relative_to(ROOT).as_posix()}"
        for path in (ROOT / "kernels").rglob("*")
        if path.is_file()
    }
    assert "cupyflash/py.typed" in sources
    assert any(name.endswith(".cuh") for name in kernels)
    assert sources | kernels == {name for name in names if ".dist-info/" not in name}


def test_wheel_has_the_license(names: set[str]) -> None:
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_version_is_the_changelogs(names: set[str]) -> None:
    assert f"cupyflash-{cupyflash.__version__}.dist-info/METADATA" in names
    assert f"## [{cupyflash.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_pre_commit_runs_what_ci_runs() -> None:
    """The tools' versions are pinned twice, as pre-commit reads no pyproject.toml."""
    pins = r"\b[\w-]+==[\d.]+"
    hooks = re.findall(pins, (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert hooks
    assert set(hooks) <= set(
        re.findall(pins, (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    )
