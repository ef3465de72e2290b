"""``python -m cupyflash bench`` on a machine without a GPU, and on one with a made-up one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyflash.__main__ import main
from cupyflash._cuda.device import Device
from cupyflash.bench import command
from cupyflash.bench.peers import PEERS
from cupyflash.bench.workloads import (
    DIRECTIONS,
    Workload,
    grid,
)
from tests.bench_fakes import Fake, crash, fake_times, make_inputs

ROOT = Path(__file__).parents[2]


def test_small_inputs_are_rotated() -> None:
    mega = 1 << 20
    assert command.copies_beyond(50 * mega, grid([64], [512], "float16")[0]) == 1
    small = Workload(1, 8192, 8192, 16, 16, 64, False, "float16")  # 48 MiB
    assert command.copies_beyond(50 * mega, small) == 3
    assert command.copies_beyond(50 * mega, replace(small, seqlen_q=1, seqlen_k=1)) == 64


# --- a whole run --------------------------------------------------------------------------------


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """A machine whose GPU is the NumPy engine, with two peers."""

    def milliseconds(
        works: Mapping[str, Callable[[], Any]], *, rounds: int = 5
    ) -> dict[str, float]:
        assert rounds == 2
        return fake_times(works)

    class Missing(Fake):
        def available(self) -> str | None:
            return "not installed"

    class Present(Fake):
        def available(self) -> str | None:
            return None

    peers = {each.name: each for each in (Present("broken", crash), Missing("missing"))}
    ours = Present("cupyflash")
    monkeypatch.setattr(command, "PEERS", peers)
    monkeypatch.setattr(command, "Ours", lambda engine: ours)
    monkeypatch.setattr(command, "current", lambda: Device.known("sm_80"))
    monkeypatch.setattr(command, "copies_beyond", lambda cache, workload: 2)
    monkeypatch.setattr(command, "draw", lambda workload: make_inputs(workload, rng))
    monkeypatch.setattr(command, "device_milliseconds", milliseconds)
    monkeypatch.setattr(command, "extra_bytes", lambda work: 1000)
    monkeypatch.setattr(command, "ceiling_tflops", lambda time: 800.0)
    monkeypatch.setattr(command, "release", lambda: None)
    monkeypatch.setattr(command, "machine", lambda device: {"device": device, "date": "2026-11-30"})


@pytest.mark.usefixtures("fake_gpu")
def test_a_run_from_options_to_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    wanted = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    arguments = ["bench", "--shapes", "1,32,2,16", "--rounds", "2", "--dtype", "float32", *wanted]
    main(arguments)
    printed = capsys.readouterr()
    assert "left out: missing: not installed" in printed.err
    assert printed.out.count("1 x 32 x 2 x 16 causal") == 2
    assert printed.out.count("  broken: RuntimeError: no kernel for this device") == 1
    content = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert content["device"] == "NVIDIA A100" and content["left_out"] == {
        "missing": "not installed"
    }
    assert len(content["rows"]) == 8
    for direction in DIRECTIONS:
        assert (tmp_path / f"a-{direction}.png").is_file()


@pytest.mark.usefixtures("fake_gpu")
def test_a_run_of_ours_alone(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            "bench",
            "--shapes",
            "1,32,2,16",
            "--rounds",
            "2",
            "--dtype",
            "float32",
            "--peers",
            "--directions",
            "forward",
        ]
    )
    printed = capsys.readouterr()
    assert not printed.err
    assert len(printed.out.splitlines()) == 4


def test_versions_are_those_installed() -> None:
    assert command.versions()["numpy"] == np.__version__


# --- the command line ---------------------------------------------------------------------------


def run(*arguments: str, hidden: Sequence[str] = (), folder: Path) -> tuple[int, str]:
    """Run the command where the modules `hidden` cannot be imported."""
    (folder / "sitecustomize.py").write_text(
        f"import sys\nfor name in {list(hidden)}: sys.modules[name] = None\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "cupyflash", "bench", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=900,  # only what hangs; a busy machine takes its time
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def test_help_names_every_peer(tmp_path: Path) -> None:
    status, output = run("--help", folder=tmp_path)
    assert status == 0
    unbroken = "".join(output.split())  # lines end at hyphens, too
    assert all(name in unbroken for name in PEERS)


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    status, output = run(hidden=["cupy"], folder=tmp_path)
    assert status == 1
    assert output.startswith("cupyflash: device arrays and GPU engines need CuPy")
    assert output.count("\n") == 1


def test_without_matplotlib_nothing_is_timed(tmp_path: Path) -> None:
    status, output = run("--plot", "a.png", hidden=["matplotlib"], folder=tmp_path)
    assert status == 1
    assert "pip install matplotlib" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "1,2,3"], "b,s,h,d or b,s,h,d,hk"),
        (["--peers", "fa5"], "invalid choice: 'fa5'"),
        (["--rounds", "0"], "0 must be at least 1"),
        (["--directions", "sideways"], "invalid choice: 'sideways'"),
    ],
)
def test_wrong_options_are_explained(arguments: list[str], message: str, tmp_path: Path) -> None:
    status, output = run(*arguments, folder=tmp_path)
    assert status == 2
    assert message in output
