"""``bench --decode``, with the NumPy engine for a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyflash.__main__ import main
from cupyflash._cuda.device import Device
from cupyflash.bench import command, decode
from cupyflash.bench.decode import DecodeResult, DecodeShape
from tests.bench_fakes import crash, fake_times

SHAPE = DecodeShape(2, 512, 32, 8, 64)  # as many elements as FP8's error needs to be near its mean
NAMES = ["contiguous", "page 16", "page 64", "page 256"]


@pytest.fixture(autouse=True)
def numbers(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Random numbers on the host."""
    draw = lambda shape, dtype: rng.standard_normal(shape).astype(ml_dtypes.bfloat16)  # noqa: E731
    monkeypatch.setattr(decode, "normal", draw)


def measure(*contenders: Any, shape: DecodeShape = SHAPE) -> list[DecodeResult]:
    cache = decode.draw(shape)
    return decode.measure(shape, cache, contenders, 4e12, fake_times, lambda work: 7.0)


def test_ours_is_right_contiguous_and_paged() -> None:
    results = measure(*decode.OURS)
    names = [*NAMES, "FP8, contiguous", "FP8, page 256"]
    assert [each.contender for each in results] == names
    assert [each.error for each in results] == [None] * 6
    assert [each.over_contiguous for each in results] == [None, 2.0, 3.0, 4.0, None, None]
    first, float8 = results[0], results[4]
    assert float8.gigabytes_per_second == pytest.approx(2.097152 / 2 / 5)  # it takes 5 ms
    # 2 x 2 x 512 x 8 x 64 elements of 2 bytes in a millisecond.
    assert first.gigabytes_per_second == pytest.approx(2.097152)
    assert first.share_of_copy == pytest.approx(2.097152e9 / 4e12)
    assert first.host_microseconds == 7.0


def test_pages_lie_in_another_order() -> None:
    cache = decode.draw(SHAPE)
    table, (key, value) = decode._pages(cache, 64)
    assert sorted(table.ravel()) == list(range(16)) and list(table.ravel()) != list(range(16))
    for pages, tokens in ((key, cache.key), (value, cache.value)):
        assert np.array_equal(pages[table].reshape(tokens.shape), tokens)


@pytest.mark.parametrize("fault", ["wrong", "crash"])
def test_who_is_wrong_is_not_timed(fault: str) -> None:
    array = crash if fault == "crash" else lambda result: result + result[:, :, ::-1]
    broken = replace(decode.ours(None), name="broken", array=array)
    bad, good = measure(broken, decode.ours(64))
    assert bad.milliseconds is None and bad.error is not None
    assert bad.error.startswith("RuntimeError" if fault == "crash" else "ArithmeticError: wrong by")
    assert good.error is None and good.over_contiguous is None
    assert "\n" not in decode.line(bad)


def test_the_table() -> None:
    row = decode.line(DecodeResult("shape", "page 16", 1.5, 20.25, 4001.2, 0.95, 1.03))
    assert row == "| shape | page 16 | 1.5000 | 4001 | 0.950 | 1.030 | 20.2 |"
    assert decode.header().splitlines()[0].count("|") == row.count("|")


def test_the_shapes_are_memory_bound() -> None:
    assert len(decode.SHAPES) == 5
    assert all(shape.bytes >= 2**29 for shape in decode.SHAPES)
    assert decode.SHAPES[0].name == "1 x 131072 x 32/8 x 128"


def test_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes = {
        "current": lambda: Device.known("sm_90a"),
        "device_milliseconds": lambda works, rounds: fake_times(works),
        "host_microseconds": lambda work: 7.0,
        "release": lambda: None,
        "machine": lambda device: {"device": device},
    }
    for name, by in fakes.items():
        monkeypatch.setattr(command, name, by)
    monkeypatch.setattr(decode, "SHAPES", (SHAPE,))
    cupy = SimpleNamespace(empty=lambda size, dtype: None, copyto=lambda target, source: None)
    monkeypatch.setattr(decode, "require_cupy", lambda: cupy)
    missing = replace(decode.ours(None), name="fa3", missing=lambda: "not installed")
    monkeypatch.setattr(decode, "PEERS", (missing,))
    path = tmp_path / "decode.json"
    main(["bench", "--decode", "--json", str(path)])
    printed = capsys.readouterr()
    assert printed.err == "left out: fa3: not installed\n"
    assert "one query, bfloat16; a copy reaches 2147 GB/s" in printed.out
    assert len(printed.out.splitlines()) == 3 + 6
    content = json.loads(path.read_text(encoding="utf-8"))
    assert len(content["results"]) == 6
    assert content["machine"]["left_out"] == {"fa3": "not installed"}


@pytest.mark.parametrize(
    ("names", "expected"),
    [(["all"], ["fa3", "torch-flash"]), (["torch-flash"], ["torch-flash"]), ([], [])],
)
def test_peers_are_those_asked_for(
    monkeypatch: pytest.MonkeyPatch, names: list[str], expected: list[str]
) -> None:
    here = tuple(replace(each, missing=lambda: None) for each in decode.PEERS)
    monkeypatch.setattr(decode, "PEERS", here)
    contenders, left_out = decode.present(names)
    assert [each.name for each in contenders[len(decode.OURS) :]] == expected and not left_out
    monkeypatch.setattr(decode, "PEERS", [replace(each, missing=lambda: "no") for each in here])
    assert list(decode.present(names)[1]) == expected
