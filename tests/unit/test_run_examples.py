"""scripts/run_examples.py: what it runs, keeps and says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("run_examples", ROOT / "scripts/run_examples.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def examples(tmp_path):
    folder = tmp_path / "examples"
    folder.mkdir()
    shared = "import sys, cupyflash\nprint(*sys.argv[1:])\n"
    (folder / "good.py").write_text(shared + "open('plot.png', 'w'); print('\\033[Jdone')\n")
    (folder / "needy.py").write_text(shared + "sys.exit('This example needs a cure: pip')\n")
    (folder / "slow.py").write_text("import time; print('begun', flush=True); time.sleep(60)\n")
    return folder


def test_log_plots_and_verdicts(script, examples, tmp_path, capsys):
    out = tmp_path / "deep" / "out"
    command = [str(out), "--only", "good", "needy"]
    assert script.main(command, examples) == 1
    assert {path.name for path in out.iterdir()} == {"plot.png", "examples.log"}
    printed = capsys.readouterr().out
    assert "1 passed, 1 failed" in printed and "needs a cure" in printed
    log = (out / "examples.log").read_text()
    good, needy = log.split("=== needy: FAILED")
    assert good.startswith("=== good: passed in ") and "--device gpu\ndone" in good
    assert "needs a cure" in needy
    assert script.main([str(out), "--device", "cpu", "--only", "good"], examples) == 0
    assert "--device cpu" in (out / "examples.log").read_text()


def test_one_that_takes_too_long(script, examples, tmp_path):
    out = tmp_path / "out"
    assert script.main([str(out), "--only", "slow", "--timeout", "5"], examples) == 1
    assert "begun\n\nstopped" in (out / "examples.log").read_text()


def test_wrong_name(script, tmp_path):
    with pytest.raises(SystemExit) as caught:
        script.main([str(tmp_path), "--only", "nothing"])
    assert caught.value.code == 2


def test_every_example_takes_the_device(script, capsys):
    with pytest.raises(SystemExit):
        script.main(["--help"])
    assert "quickstart" in capsys.readouterr().out
    texts = [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    assert all('"--device"' in text for text in texts)
