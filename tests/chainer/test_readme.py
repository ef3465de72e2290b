"""The README's Chainer section does what it says."""

from __future__ import annotations

import re
from pathlib import Path

import cupyflash
from tests.unit.test_import import run


def test_readme():
    path = Path(cupyflash.__file__).parents[1] / "README.md"
    section = path.read_text(encoding="utf-8").split("## Chainer\n")[1]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    printed = re.search(r"print\(.*\)  # (.*)\n", code)[1]
    assert run(code) == printed
