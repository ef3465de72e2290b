"""Command line: ``python -m tests.compile_ahead --cache FOLDER [arguments of pytest]``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from cupyflash._cuda import cache
from tests import compile_ahead

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str]) -> int:
    """Run tests/cuda on the stand-in, and say what the cache then holds."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.compile_ahead", description=compile_ahead.__doc__.partition("\n")[0]
    )
    parser.add_argument("--cache", type=Path, required=True, help="folder for the kernels")
    options, rest = parser.parse_known_args(arguments)
    os.environ["CUPYFLASH_CACHE_DIR"] = str(options.cache.resolve())
    if not any(argument.startswith("tests/") for argument in rest):
        rest = ["tests/cuda", *rest]
    # Large arrays would fill the host's memory; why tests are skipped is known.
    command = [sys.executable, "-m", "pytest", "-p", "tests.compile_ahead.plugin", "-rfE"]
    status = subprocess.run([*command, "-m", "not large", *rest], cwd=ROOT, check=False).returncode
    print(f"{len(cache.entries())} kernels, {cache.size() / 1e6:.0f} MB in {cache.path()}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
