"""``python -m cupyflash.bench.first_call`` with made-up times, and where there is no GPU."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from cupyflash._cuda.device import Device
from cupyflash.bench import first_call
from tests.bench_fakes import make_inputs


def test_each_head_dim_starts_twice_with_one_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def run(command: list[str], env: dict[str, str], **options: object) -> SimpleNamespace:
        assert command[:3] == [sys.executable, "-m", first_call.MODULE]
        asked.append((command[3], env["CUPYFLASH_CACHE_DIR"]))
        return SimpleNamespace(stdout=json.dumps([1.5, 0.25]))

    monkeypatch.setattr(first_call.subprocess, "run", run)
    monkeypatch.setattr(first_call, "current", lambda: Device.known("sm_80"))
    monkeypatch.setattr(sys, "argv", ["first_call"])
    first_call.main()
    assert [head_dim for head_dim, _ in asked] == ["64", "64", "128", "128", "256", "256"]
    folders = [folder for _, folder in asked]
    assert folders[::2] == folders[1::2] and len(set(folders)) == 3
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows[:2] == [["64", "empty", "1.500", "0.250"], ["64", "filled", "1.500", "0.250"]]


def test_the_process_prints_what_its_parent_reads(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def small(workload: object) -> object:
        from tests.bench_fakes import SMALL

        return make_inputs(SMALL, rng)

    runtime = SimpleNamespace(deviceSynchronize=lambda: None)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(first_call, "draw", small)
    monkeypatch.setattr(first_call, "require_cupy", lambda: cupy)
    monkeypatch.setattr(sys, "argv", ["first_call", "64"])
    first_call.main()
    forward, backward = json.loads(capsys.readouterr().out)
    assert 0 < forward < 60 and 0 < backward < 60
