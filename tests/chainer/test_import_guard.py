"""The import guard: Chainer runs beside NumPy 2 and CuPy 14, and nothing is left behind."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer.training.updaters import multiprocess_parallel_updater

from cupyflash._cuda.compiler import compile_source
from cupyflash.chainer import import_guard
from cupyflash.errors import CompileError
from tests.unit.test_import import run

SITE = Path(chainer.__file__).parents[1]


def source(module: str) -> str:
    path = SITE.joinpath(*module.split("."))
    return path.with_suffix(".py").read_text(encoding="utf-8")


# --- what is left behind ------------------------------------------------------------------------


def test_numpy_and_sys_modules_stay_as_they_are():
    code = """
import sys, numpy, numpy.ma, numpy.testing
before = {name: dict(vars(m)) for name, m in sys.modules.items() if name.startswith("numpy")}
import cupyflash.chainer, chainer
for name, attributes in before.items():
    now = {k: v for k, v in vars(sys.modules[name]).items() if not k.startswith("__")}
    # Submodules become attributes of their package when they are first imported.
    added = {k for k in set(now) - set(attributes) if f"{name}.{k}" not in sys.modules}
    changed = {k for k in set(now) & set(attributes) if now[k] is not attributes[k]}
    assert not added and not changed, (name, added, changed)
for name in ("sctypes", "float", "int", "object", "distutils"):
    assert not hasattr(numpy, name), name
assert not {"numpy.distutils", "pkg_resources"} & set(sys.modules)
print(*(name for name, m in list(sys.modules.items()) if not vars(m).get("__spec__")))
"""
    # Modules that come from no file: Cython, six and typing make some, nobody else may.
    made = {name.partition(".")[0] for name in run(code).split()}
    assert not made & {"numpy", "setuptools", "pkg_resources", "distutils", "chainer", "cupyflash"}


def test_chainer_needs_the_guard_and_a_failed_import_does_no_harm():
    code = """
try:
    import chainer
except AttributeError as error:
    print("sctypes" in str(error), end=" ")
import cupyflash.chainer, chainer
print(chainer.__version__, chainer.functions.sum(chainer.Variable(chainer.as_array(
    __import__("numpy").ones(3, "f")))).array)
"""
    assert run(code) == "True 7.8.1 3.0"


def test_a_chainer_that_is_already_imported_is_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [])
    before = dict(sys.modules)
    import_guard.install()
    assert sys.meta_path == []
    assert sys.modules == before


def test_importing_twice_adds_one_finder():
    code = """
import sys, cupyflash.chainer
from cupyflash.chainer import import_guard
import_guard.install(); del sys.modules["chainer"]; import_guard.install()
print(sys.meta_path.count(import_guard._Finder))
"""
    assert run(code) == "1"


def test_warnings_are_errors_elsewhere_too():
    subprocess.run([sys.executable, "-W", "error", "-c", "import cupyflash.chainer"], check=True)


@pytest.mark.parametrize("found", [None, "7.7.0"])
def test_another_release_is_refused(monkeypatch, found):
    def version(name: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.delitem(sys.modules, "chainer")
    monkeypatch.setattr(sys, "meta_path", [])
    with pytest.raises(ImportError, match=rf"found {found or 'none'}: pip install .*chainer==7\.8"):
        import_guard.install()


# --- what is repaired ---------------------------------------------------------------------------


@pytest.mark.parametrize("module", import_guard.REPAIRS)
def test_every_repair_applies_and_keeps_lines(module):
    text = source(module)
    repaired = import_guard.repaired(module, text)
    assert repaired != text
    compile(repaired, module, "exec")
    if "communicators" not in module:  # there a line of CUDA is added inside a string
        assert repaired.count("\n") == text.count("\n")
    with pytest.raises(ImportError, match=r"is not Chainer 7\.8\.1's"):
        import_guard.repaired(module, "pass\n")


def test_repaired_modules_import():
    mpi = "sys.modules |= {'mpi4py': MagicMock(), 'mpi4py.MPI': MagicMock()}"  # for ChainerMN
    imports = f"import cupyflash.chainer, {', '.join(import_guard.REPAIRS)}"
    run(f"import sys; from unittest.mock import MagicMock; {mpi}; {imports}")


def test_as_strided_and_its_gradient(rng):
    x = chainer.Variable(rng.normal(size=6))
    y = F.as_strided(x, (3, 2), (1, 1))
    F.sum(y * np.arange(6.0).reshape(3, 2)).backward()
    np.testing.assert_array_equal(y.array, np.stack([x.array[:3], x.array[1:4]], axis=1))
    np.testing.assert_array_equal(x.grad, [0, 1 + 2, 3 + 4, 5, 0, 0])


@pytest.mark.parametrize("align_corners", [True, False])
def test_resize_images(align_corners):
    x = np.arange(4, dtype=np.float32).reshape(1, 1, 2, 2)
    y = F.resize_images(x, (3, 3), align_corners=align_corners).array[0, 0]
    np.testing.assert_allclose(y, [[0, 0.5, 1], [1, 1.5, 2], [2, 2.5, 3]], atol=1e-6)
    nearest = F.resize_images(x, (4, 4), mode="nearest", align_corners=False).array[0, 0]
    np.testing.assert_array_equal(nearest, np.kron(x[0, 0], np.ones((2, 2))))


def test_categorical():
    p = np.array([[0.2, 0.8], [0.5, 0.5]], np.float32)
    log_prob = chainer.distributions.Categorical(p=p).log_prob(np.array([1, 0]))
    np.testing.assert_allclose(log_prob.array, np.log([0.8, 0.5]), rtol=1e-5)


# --- half-precision kernels ---------------------------------------------------------------------


def compiles(code: str) -> bool:
    """Whether NVRTC takes `code` beside CuPy's headers, as CuPy would; no GPU needed."""
    pytest.importorskip("cupy")
    pytest.importorskip("cuda.pathfinder")
    packages = Path(importlib.util.find_spec("cupy").origin).parents[1]
    runtime = [path.parent for path in packages.glob("nvidia/**/include/cuda_fp16.h")]
    if not runtime:
        pytest.skip("the CUDA runtime's headers are not installed")
    folders = [packages / "cupy/_core/include", runtime[0]]
    try:
        compile_source(code, "sm_80", [f"-I{folder}" for folder in folders], headers={})
    except CompileError as error:
        if not re.search(r'"half" is undefined|complete object type', str(error)):
            raise
        return False
    return True


def test_chainermn_kernels_know_half(monkeypatch, tmp_path):
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path))
    module = "chainermn.communicators._memory_utility"
    texts = source(module), import_guard.repaired(module, source(module))
    before, after = (re.findall(r"r'''(.*?)'''", text, re.DOTALL) for text in texts)
    assert len(before) == len(after) == 2
    assert not any(map(compiles, before))
    assert all(map(compiles, after))


@pytest.mark.parametrize("name", ["_memcpy_gather", "_memcpy_scatter"])
def test_parallel_updater_kernels_know_float16(monkeypatch, tmp_path, name):
    """Put together as CuPy's ElementwiseKernel does; arrays stand as plain pointers."""
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path))
    captured = {}

    def elementwise(in_params, out_params, operation, name, **options):
        captured.update(options, operation=operation)

    monkeypatch.setattr(multiprocess_parallel_updater.cuda, "elementwise", elementwise)
    getattr(multiprocess_parallel_updater, name)()
    kernel = f"""
extern "C" __global__ void kernel(const unsigned long long* ptrs, const signed char* dtypes,
                                  const int* info, float* dst, float* array, int size) {{
  {captured["loop_prep"]};
  for (int i = threadIdx.x; i < size; i += blockDim.x) {{
    {captured["operation"]};
  }}
}}
"""
    headers = "#include <cupy/carray.cuh>\n"
    assert not compiles(headers + kernel)
    assert compiles(headers + captured["preamble"] + "\n" + kernel)
