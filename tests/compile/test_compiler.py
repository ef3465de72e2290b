"""NVRTC without a GPU: cubins for every architecture, usage, errors, keys."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cupyflash._cuda import cache, module, source
from cupyflash._cuda.compiler import Compilation, compile_source, nvrtc_version
from cupyflash._cuda.device import Device
from cupyflash.errors import CompileError

STUB = """\
#include "common/scale.cuh"
constexpr Config config{.factor = 2.0f};
static_assert(config.factor > 0.0f, "a positive factor");
extern "C" __global__ void scale_array(float* x) { scale<config>(x); }
"""
HEADER = """\
#pragma once
struct Config {
  float factor;
};
template <Config config>
__device__ void scale(float* x) {
  x[threadIdx.x] *= config.factor;
}
"""
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(source, "kernels_root", lambda: tmp_path / "kernels")
    (tmp_path / "kernels/common").mkdir(parents=True)
    (tmp_path / "kernels/common/scale.cuh").write_text(HEADER)
    (tmp_path / "kernels/common/unused.cuh").write_text("#error never read\n")
    return tmp_path / "kernels"


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles_for(arch: str) -> None:
    compilation = compile_source(STUB, arch)
    assert compilation.cubin.startswith(b"\x7fELF")
    assert compilation.entries["scale_array"].registers > 0
    assert compilation.entries["scale_array"].spill_stores == 0
    assert compilation.warnings == ()
    assert Device.known(arch).arch == arch


def test_the_cubin_is_whole_and_repeatable() -> None:
    cubin = compile_source(STUB, "sm_80").cubin
    sections_at = int.from_bytes(cubin[0x28:0x30], "little")
    size, count = (int.from_bytes(cubin[at : at + 2], "little") for at in (0x3A, 0x3C))
    programs_at = int.from_bytes(cubin[0x20:0x28], "little")
    program_size, programs = (int.from_bytes(cubin[a : a + 2], "little") for a in (0x36, 0x38))
    assert len(cubin) == max(sections_at + size * count, programs_at + program_size * programs)
    assert compile_source(STUB, "sm_80").cubin == cubin


def test_float32_is_exact() -> None:
    """Division and square root are correctly rounded, and denormals are kept."""
    stub = 'extern "C" __global__ void f(float* x) { x[0] = sqrtf(x[1] / x[2]) + exp2f(x[3]); }'
    cubin = compile_source(stub, "sm_80", headers={}).cubin
    fast = compile_source(stub, "sm_80", ["--use_fast_math"], headers={}).cubin
    flushed = compile_source(stub, "sm_80", ["--ftz=true"], headers={}).cubin
    explicit = ["--ftz=false", "--prec-div=true", "--prec-sqrt=true"]
    assert compile_source(stub, "sm_80", explicit, headers={}).cubin == cubin
    assert cubin not in (fast, flushed)


def test_usage_and_warnings_are_read_from_the_log() -> None:
    log = """\
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; no register count.
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'small' for 'sm_90a'
ptxas info    : Function properties for small
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
ptxas info    : Compiling entry function 'large' for 'sm_90a'
ptxas info    : Function properties for large
    704 bytes stack frame, 1268 bytes spill stores, 1460 bytes spill loads
ptxas info    : Function properties for helper
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 704 bytes cumulative stack size"""
    compilation = Compilation(b"", log)
    assert list(compilation.entries) == ["small", "large"]
    large = compilation.entries["large"]
    assert (large.registers, large.stack) == (32, 712)
    assert (large.spill_stores, large.spill_loads) == (1272, 1464)
    assert [line.split("(")[1][:5] for line in compilation.warnings] == ["C7508"]


def test_an_ignored_setmaxnreg_is_a_warning() -> None:
    stub = 'extern "C" __global__ void f() { asm("setmaxnreg.inc.sync.aligned.u32 240;"); }'
    assert "C7508" in compile_source(stub, "sm_90a", headers={}).warnings[0]


def test_a_missing_include_is_named_with_its_line() -> None:
    with pytest.raises(CompileError) as caught:
        compile_source('#include "tile/absent.cuh"\n', "sm_80", plan="Plan(head_dim=64)")
    message = str(caught.value)
    assert "Plan(head_dim=64)" in message
    assert f"NVRTC {nvrtc_version()[0]}.{nvrtc_version()[1]}, -arch=sm_80" in message
    assert 'stub.cu(1): catastrophic error: could not open source file "tile/absent.cuh"' in message
    saved = Path(message.rpartition("source and full log: ")[2])
    assert saved.read_text().startswith('#include "tile/absent.cuh"\n')
    assert "// stub.cu(1): catastrophic error" in saved.read_text()


def test_a_long_log_is_cut_in_the_message_and_whole_in_the_file(root: Path) -> None:
    (root / "broken.cuh").write_text("int a = b;\n" * 40)
    with pytest.raises(CompileError, match=r"broken.cuh\(1\): error") as caught:
        compile_source('#include "broken.cuh"\n', "sm_80")
    assert "more lines" in str(caught.value)
    assert len(str(caught.value).splitlines()) < 20
    saved = Path(str(caught.value).rpartition("source and full log: ")[2])
    assert "broken.cuh(40)" in saved.read_text()


def test_an_unknown_architecture_is_a_compile_error() -> None:
    with pytest.raises(CompileError, match="invalid value for --gpu-architecture"):
        compile_source(STUB, "sm_10")


def test_the_compiler_sees_no_files_but_the_closure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "local.cuh").write_text("#pragma once\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompileError, match=r"local\.cuh"):
        compile_source('#include "local.cuh"\n', "sm_80")


def test_threads_compile_at_once() -> None:
    with ThreadPoolExecutor(4) as pool:
        cubins = list(pool.map(lambda arch: compile_source(STUB, arch).cubin, ["sm_80"] * 4))
    assert len(set(cubins)) == 1


def build(stub: str = STUB, arch: str = "sm_80") -> tuple[str, cache.Cubin]:
    return module.build(stub, ["scale_array"], arch)


def test_an_edited_header_is_another_kernel_and_an_unreached_one_is_not(root: Path) -> None:
    key, cubin = build()
    assert cubin.path.name == f"scale_array-{key}.cubin"
    (root / "common/unused.cuh").write_text("#error edited\n")
    source.read_header.cache_clear()
    assert build() == (key, cubin)
    (root / "common/scale.cuh").write_text(HEADER.replace("*=", "+="))
    source.read_header.cache_clear()
    edited_key, edited = build()
    assert edited_key != key
    assert edited.data != cubin.data
    assert len(cache.entries()) == 2


def test_stub_and_architecture_are_part_of_the_key() -> None:
    keys = {build()[0], build(arch="sm_86")[0], build(STUB.replace("2.0f", "3.0f"))[0]}
    assert len(keys) == 3


def test_compiling_needs_neither_cupy_nor_a_gpu() -> None:
    program = (
        "import sys, cupyflash; from cupyflash._cuda import launch, module;"
        "from cupyflash._cuda.compiler import compile_source;"
        "compile_source('extern \"C\" __global__ void f() {}', 'sm_80', headers={});"
        "sys.exit('cupy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
