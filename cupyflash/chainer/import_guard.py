"""Lets Chainer 7.8.1, its last release, run beside NumPy 2 and CuPy 14.

Lines that use what NumPy, setuptools or CuPy have since removed are replaced in memory, while
Chainer's modules are loaded. Chainer's files, numpy and sys.modules stay as they are.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

__all__ = ["install"]

VERSION = "7.8.1"
PACKAGES = ("chainer", "chainermn", "chainerx", "onnx_chainer")

_HALF_HEADER = (
    "#include <cupy/carray.cuh>\n",
    "#include <cupy/carray.cuh>\n#include <cupy/float16.cuh>\n",  # CuPy 14 has half only there
)
_FLOAT16_PREAMBLE = ("loop_prep='''", "preamble='#include <cupy/float16.cuh>', loop_prep='''")
_LAZY_PKG_RESOURCES = (
    ("import pkg_resources\n", "\n"),
    ("    ws = pkg_resources", "    import pkg_resources; ws = pkg_resources"),
)

# Module -> what to replace, wherever it stands. No line is added, so tracebacks stay right.
REPAIRS: dict[str, tuple[tuple[str, str], ...]] = {
    # Asks setuptools whether it knows these versions of NumPy and CuPy: it does not.
    "chainer._environment_check": (
        ("import numpy.distutils.system_info\n", "\n"),
        ("import pkg_resources\n", "\n"),
        ("    _check_osx_numpy_backend()\n", "\n"),
        ("    _check_optional_dependencies()\n", "\n"),
    ),
    # Without this a warning at the first GPU array asks for cuDNN, which CuPy 14 no longer has.
    "chainer.backends.cuda": (
        ("int(os.environ.get('CHAINER_CUDNN', '1')) == 0", "_cupy_major >= 14"),
    ),
    "chainer.distributions.categorical": (("self.log_p[mg + [", "self.log_p[list(mg) + ["),),
    "chainer.functions.array.as_strided": (
        ("np.sctypes['int']", "(np.int8, np.int16, np.int32, np.int64)"),
        ("np.sctypes['float']", "(np.float16, np.float32, np.float64)"),
    ),
    "chainer.functions.array.resize_images": (("dtype=numpy.float)", "dtype=float)"),),
    "chainer.testing.doctest_helper": _LAZY_PKG_RESOURCES,
    "chainer.testing.helper": _LAZY_PKG_RESOURCES,
    "chainer.training.updaters.multiprocess_parallel_updater": (
        _FLOAT16_PREAMBLE,
        # CuPy 14's module imports without NCCL, warns, and is empty; this one does not import.
        ("from cupy.cuda import nccl", "from cupy_backends.cuda.libs import nccl"),
    ),
    "chainermn.communicators._memory_utility": (
        _HALF_HEADER,
        ("xp.array(v, copy=False, dtype=transfer_dtype)", "v.astype(transfer_dtype)"),
    ),
}


class _RepairingLoader(importlib.machinery.SourceFileLoader):
    """Compiles a module from its repaired source, past the byte code that Python caches."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = importlib.util.decode_source(self.get_data(path))
        code: CodeType = self.source_to_code(repaired(fullname, source), path)
        return code


class _Finder:
    """Finds the modules of `REPAIRS`, and no others."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in REPAIRS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _RepairingLoader(name, spec.origin)
        return spec


def repaired(module: str, source: str) -> str:
    """Return a module's source with its repairs."""
    for old, new in REPAIRS[module]:
        if old not in source:
            raise ImportError(f"{module} is not Chainer {VERSION}'s: it has no {old.strip()!r}")
        source = source.replace(old, new)
    return source


def install() -> None:
    """Make ``import chainer`` work from here on; do nothing if Chainer was already imported.

    Raises
    ------
    ImportError
        Chainer is not installed, or it is another release.
    """
    if "chainer" in sys.modules or _Finder in sys.meta_path:
        return
    try:
        found = importlib.metadata.version("chainer")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != VERSION:
        raise ImportError(
            f"cupyflash.chainer needs Chainer {VERSION}, found {found}: "
            f'pip install "setuptools<82" wheel, then '
            f"pip install --no-build-isolation chainer=={VERSION}"
        )
    _forget_failed_import()
    finder: Any = _Finder
    sys.meta_path.insert(0, finder)


def _forget_failed_import() -> None:
    """Drop the submodules that an ``import chainer`` without repairs left before it failed."""
    for name in list(sys.modules):
        if name.partition(".")[0] in PACKAGES:
            del sys.modules[name]
