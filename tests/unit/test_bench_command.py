"""``python -m cupyflash bench`` on a machine without a GPU, and on one with a made-up one."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
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
from cupyflash.bench import command, features, options
from cupyflash.bench.peers import PEERS
from cupyflash.bench.runner import Result
from cupyflash.bench.workloads import (
    DIRECTIONS,
    Workload,
    grid,
)
from cupyflash.errors import NoDeviceError
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


SMALL = ("--shapes", "1,32,2,16", "1,16,2,16", "--rounds", "2", "--dtype", "float32")


@pytest.mark.usefixtures("fake_gpu")
def test_a_run_of_features(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    softcap = [each for each in features.FEATURES if each.name.startswith("softcap")]
    monkeypatch.setattr(features, "FEATURES", softcap)
    path = tmp_path / "a.json"
    main(["bench", "--features", *SMALL, "--masks", "causal", "--peers", "--json", str(path)])
    printed = capsys.readouterr()
    assert printed.err == "left out: torch-flex: not asked for\n"
    assert printed.out.count("| softcap 30 | forward |") == 2
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    assert [each["workload"] for each in results[::2]] == [
        "1 x 32 x 2 x 16 causal",
        "1 x 16 x 2 x 16 causal",
    ]


@pytest.mark.usefixtures("fake_gpu")
def test_a_run_that_tunes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tune(workload: Workload, direction: str, engine: str, *_: object) -> str:
        return f"{workload.name}, {direction}, {engine}"

    monkeypatch.setattr(command, "tune_tiles", tune)
    monkeypatch.setattr(command, "select", lambda problem, place, engine: engine)
    main(["bench", "--tune", *SMALL, "--directions", "backward", "--engine", "simt"])
    workloads = [f"1 x {n} x 2 x 16 {mask}" for n in (32, 16) for mask in ("full", "causal")]
    tuned = capsys.readouterr().out.splitlines()[1:]
    assert tuned == [f"{each}, backward, simt" for each in workloads]


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize("directions", [[], ["--directions", "forward"]])
def test_float8_goes_forward(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], directions: list[str]
) -> None:
    monkeypatch.setattr(command, "drawn", lambda gpu, workload: [])
    monkeypatch.setattr(command, "race", lambda *given: [Result(*given[:2], "cupyflash", 1.0)])
    main(["bench", *SMALL[:-1], "float8_e4m3fn", *directions])
    printed = capsys.readouterr().out
    assert printed.count(" forward ") == 4 and "backward" not in printed


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
        (["--rounds", "0"], "'0' must be at least 1"),
        (["--rounds", "two"], "'two' must be a whole number"),
        (["--head-dims", "500"], "d must be at most 256, got 500"),
        (["--directions", "sideways"], "invalid choice: 'sideways'"),
    ],
)
def test_wrong_options_are_explained(arguments: list[str], message: str, tmp_path: Path) -> None:
    status, output = run(*arguments, folder=tmp_path)
    assert status == 2
    assert message in output


# --- options that do not go together, and files that cannot be written ---------------------------


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run the command, which must end with one line before it looks for a GPU; return the line."""

    def look() -> Device:
        raise AssertionError("this would have been measured")

    def line(*arguments: object) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["bench", *map(str, arguments)])
        message = str(ended.value)
        assert message.startswith("cupyflash: ") and "\n" not in message
        return message

    monkeypatch.setattr(command, "current", look)
    return line


@pytest.mark.parametrize(
    ("mode", "ignored"),
    [
        ("--decode", "--shapes 1,32,2,16"),
        ("--decode", "--head-dims 64"),
        ("--decode", "--seqlens 512"),
        ("--decode", "--directions forward"),
        ("--decode", "--masks causal"),
        ("--decode", "--engine mma"),
        ("--decode", "--dtype bfloat16"),
        ("--decode", "--plot a.png"),
        ("--decode", "--tune"),
        ("--decode", "--features"),
        ("--decode", "--peers torch-cudnn"),
        ("--decode", "--peers torch-flex"),
        ("--features", "--tune"),
        ("--features", "--plot a.png"),
        ("--features", "--peers fa3"),
        ("--tune", "--peers fa3"),
        ("--tune", "--peers"),
        ("--tune", "--json a.json"),
        ("--tune", "--plot a.png"),
        ("--shapes 1,32,2,16", "--head-dims 64"),
        ("--shapes 1,32,2,16", "--seqlens 512"),
        ("--dtype float8_e4m3fn", "--tune"),
        ("--dtype float8_e4m3fn", "--features"),
        ("--dtype float8_e4m3fn", "--directions backward"),
        ("--dtype float8_e4m3fn", "--directions forward backward"),
        ("", "--peers torch-flex"),
    ],
)
def test_what_would_be_ignored_is_refused(
    refused: Callable[..., str], mode: str, ignored: str
) -> None:
    message = refused(*mode.split(), *ignored.split())
    assert mode.split(",")[0].split(" 1")[0] in message and ignored.split()[0] in message


def test_all_that_is_to_be_left_out_is_named_at_once(refused: Callable[..., str]) -> None:
    message = refused("--decode", "--masks", "full", "--dtype", "float16", "--rounds", 2)
    assert message == "cupyflash: leave out --masks --dtype, which --decode does not take"
    message = refused("--directions", "forward", "backward", "--dtype", "float8_e4m3fn")
    assert "leave out --directions backward, which --dtype float8_e4m3fn does" in message


def written_commands() -> list[str]:
    """The options of every bench command that the project shows or runs."""
    shown = [path.read_text("utf-8") for path in (*ROOT.glob("*.md"), ROOT / "kernels/TUNING.md")]
    commands = re.findall(r"`(?:python -m cupyflash )?(bench(?:\s+-[^`]*)?)`", "\n".join(shown))
    commands += re.findall(r"^    python -m cupyflash (bench.*)", "\n".join(shown), re.M)
    script = (ROOT / "scripts/gpu_checks.sh").read_text("utf-8").replace("\\\n", " ")
    return commands + re.findall(r"-m cupyflash (bench.*)", script)


def test_commands_of_the_documentation_are_accepted() -> None:
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    commands = [each.replace("b,s,h,d", "1,32,2,16") for each in written_commands()]
    assert len(commands) >= 15
    for each in commands:
        options.refuse_ignored(vars(parser.parse_args(shlex.split(each)[1:])))


@pytest.mark.parametrize(
    ("mode", "option"),
    [("", "--json"), ("", "--plot"), ("--features", "--json"), ("--decode", "--json")],
)
def test_files_are_tried_before_anything_is_measured(
    refused: Callable[..., str], tmp_path: Path, mode: str, option: str
) -> None:
    missing = refused(*mode.split(), option, tmp_path / "missing" / "a.png")
    assert f"{tmp_path}/missing" in missing and "No such file or directory" in missing
    for folder in (tmp_path, ".", "/"):
        assert "Is a directory" in refused(*mode.split(), option, folder)
    assert not list(tmp_path.iterdir())


def test_the_plot_of_each_direction_is_tried(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "a-backward.png").mkdir()
    assert "a-backward.png cannot be written" in refused("--plot", tmp_path / "a")
    assert [file.name for file in tmp_path.iterdir()] == ["a-backward.png"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_file_that_may_not_be_written(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text("{}")
    (tmp_path / "kept.json").chmod(0o400)
    assert "Permission denied" in refused("--json", tmp_path / "kept.json")
    tmp_path.chmod(0o500)
    assert "Permission denied" in refused("--json", tmp_path / "new.json")


def test_an_earlier_file_is_kept_until_there_is_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def look() -> Device:
        raise NoDeviceError("none")

    monkeypatch.setattr(command, "current", look)
    (tmp_path / "old.json").write_text("old")
    for name in ("old", "new"):
        with pytest.raises(SystemExit, match="none"):
            main(["bench", "--json", str(tmp_path / f"{name}.json")])
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("old.json", "old")]


def test_a_plot_of_an_unknown_format(refused: Callable[..., str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    message = refused("--plot", tmp_path / "a.xyz")
    assert "--plot" in message and "xyz" in message and "png" in message


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize("name", ["a", "a.png", "a.SVG"])
def test_plots_of_any_format(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    sizes = ["--shapes", "1,32,2,16", "--rounds", "2", "--dtype", "float32"]
    main(["bench", *sizes, "--directions", "forward", "--plot", str(tmp_path / name)])
    suffix = Path(name).suffix or ".png"
    assert [file.name for file in tmp_path.iterdir()] == [f"a-forward{suffix}"]
