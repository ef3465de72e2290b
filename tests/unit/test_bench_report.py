"""The benchmark's table, JSON and plot, from made-up results."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cupyflash.bench import report
from cupyflash.bench.runner import Result
from cupyflash.bench.workloads import (
    DIRECTIONS,
    grid,
)


def made_up() -> list[Result]:
    results = []
    for workload in grid([64, 128], [512, 1024], "bfloat16"):
        for direction in DIRECTIONS:
            flops = workload.flops(direction)
            results += [
                Result(workload, direction, "cupyflash", flops / 4e11, 68_000_000),
                Result(workload, direction, "slow", flops / 2e11, 70_000_000),
                Result(workload, direction, "fast", flops / 5e11, 35_000_000),
                Result(workload, direction, "broken", error="RuntimeError: no\nkernel"),
            ]
    return results


NAMES = ["cupyflash", "slow", "fast", "broken"]


def test_ratio_is_to_the_best_peer() -> None:
    one = made_up()[:4]
    best = report.best_peer(one)
    assert best is not None and best.contender == "fast"
    assert report.ratio(one) == pytest.approx(0.8)
    assert report.ratio(one[:1]) is None
    assert report.ratio(one[1:]) is None


def test_table() -> None:
    heading, row, failure, *_ = report.table(made_up(), NAMES, ceiling=800).splitlines()
    assert heading.split()[7:11] == NAMES
    expected = "32 x 512 x 32 x 64 full forward 400 200 500 - 0.80 50% 68 (35)"
    assert " ".join(row.split()) == expected
    assert failure == "  broken: RuntimeError: no kernel"
    assert len(report.table(made_up(), NAMES).splitlines()) == 1 + 1 + 16


def test_table_of_ours_alone() -> None:
    (_, row) = report.table(made_up()[:1], NAMES[:1]).splitlines()
    assert row.split()[-5:] == ["400", "-", "-", "68", "(-)"]


def test_json() -> None:
    content = json.loads(json.dumps(report.to_json(made_up(), {"device": "a GPU"}, 800.0)))
    assert content["device"] == "a GPU" and content["ceiling_tflops"] == 800
    assert len(content["rows"]) == len(made_up())
    ours, slow, _, broken = content["rows"][:4]
    assert ours["best_peer"] == "fast" and ours["ratio_to_best_peer"] == pytest.approx(0.8)
    assert ours["share_of_ceiling"] == pytest.approx(0.5)
    assert (ours["batch"], ours["seqlen_q"], ours["causal"]) == (32, 512, False)
    assert slow["extra_bytes"] == 70_000_000
    assert broken["error"] == "RuntimeError: no\nkernel" and broken["tflops"] is None


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawing = report.figure(made_up(), "forward", "a GPU")
    assert [axes.get_title() for axes in drawing.axes] == [
        "head_dim 64, full",
        "head_dim 128, full",
        "head_dim 64, causal",
        "head_dim 128, causal",
    ]
    line = drawing.axes[0].lines[0]
    assert line.get_label() == "cupyflash"
    np.testing.assert_allclose(line.get_xydata(), [[512, 400], [1024, 400]])
    assert [each.get_label() for each in drawing.axes[0].lines] == NAMES[:3]
    drawing.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_plot_of_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.figure([], "forward", "a GPU").savefig(tmp_path / "plot.png")
