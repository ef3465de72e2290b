"""Chainer is optional: where it is missing nothing in this folder is collected."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = ["*.py"]
if importlib.util.find_spec("chainer"):
    import cupyflash.chainer  # noqa: F401, lets the tests import Chainer

    collect_ignore_glob = []
