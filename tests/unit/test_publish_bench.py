"""The benchmark in README.md is that of docs/benchmarks, and what the script makes of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cupyflash.bench.report import from_json, to_json
from cupyflash.bench.runner import Result
from cupyflash.bench.workloads import grid

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def publish() -> Any:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import publish_bench
    finally:
        sys.path.pop(0)
    return publish_bench


def made_up() -> dict[str, Any]:
    results = []
    for workload in grid([64], [512, 1024], "bfloat16"):
        for direction in ("forward", "backward"):
            flops = workload.flops(direction)
            results += [
                Result(workload, direction, "cupyflash", flops / 4e11, 1),
                Result(workload, direction, "torch-flash", flops / 2e11, 1),
                Result(workload, direction, "fa3", flops / 5e11, 1),
                Result(workload, direction, "fa4", error="no kernel"),
            ]
    machine = {
        "device": "NVIDIA H200",
        "dtype": "bfloat16",
        "date": "2026-11-30T00:00:00+00:00",
        "versions": {"torch": "2.11.0"},
        "command": "python -m cupyflash bench --json /some/where/a.json",
    }
    return to_json(results, machine)


def test_json_comes_back() -> None:
    content = json.loads(json.dumps(made_up()))
    machine = {name: value for name, value in content.items() if name != "rows"}
    assert to_json(from_json(content), machine) == content


def test_readme_shows_the_published_run(publish: Any) -> None:
    _, between, _ = publish.split((ROOT / "README.md").read_text(encoding="utf-8"))
    files = [file for file in publish.FOLDER.glob("*.json") if "decode" not in file.name]
    runs = [json.loads(file.read_text("utf-8")) for file in files]
    assert between in [publish.section(run) for run in runs if publish.variant_of(run) is None]
    for run in runs:
        for direction in publish.directions_of(run):
            plot = publish.FOLDER / f"{publish.file_name(run)}-{direction}.png"
            assert plot.stat().st_size < 200_000


@pytest.fixture
def elsewhere(publish: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the project's place, which is written to."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    monkeypatch.setattr(publish, "FOLDER", tmp_path / "docs")
    return tmp_path


def test_a_run_is_published(publish: Any, elsewhere: Path) -> None:
    (elsewhere / "run.json").write_text(json.dumps(made_up()))
    (elsewhere / "README.md").write_text(f"before\n{publish.BEGIN}\nold\n{publish.END}\nafter\n")
    publish.main(elsewhere / "run.json")
    names = ["nvidia-h200-backward.png", "nvidia-h200-forward.png", "nvidia-h200.json"]
    assert sorted(file.name for file in (elsewhere / "docs").iterdir()) == names
    assert "/some" not in (elsewhere / "docs" / "nvidia-h200.json").read_text()
    text = (elsewhere / "README.md").read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "FlashAttention-2's speed: forward 2.00 to 2.00 (mean 2.00), backward 2.00" in text
    assert "the best peer's speed: forward 0.80 to 0.80 (mean 0.80), backward 0.80" in text
    cell = "400 / 200 / 500 FlashAttention-3"
    assert f"| backward, d 64, causal | {cell} | {cell} |" in text
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    assert rows[1:] == [
        "| forward, d 64, full",
        "| forward, d 64, causal",
        "| backward, d 64, full",
        "| backward, d 64, causal",
    ]


def test_a_run_of_each_direction_without_flash_attention_2(publish: Any, elsewhere: Path) -> None:
    (elsewhere / "README.md").write_text(f"{publish.BEGIN}\n{publish.END}\n")
    files = []
    for direction in ("forward", "backward"):
        run = made_up()
        run["command"] = f"python -m cupyflash bench --directions {direction} --rounds 3"
        run["rows"] = [
            row
            for row in run["rows"]
            if row["direction"] == direction and row["contender"] != "torch-flash"
        ]
        files.append(elsewhere / f"{direction}.json")
        files[-1].write_text(json.dumps(run))
    publish.main(*files)
    text = (elsewhere / "README.md").read_text()
    assert "`python -m cupyflash bench --rounds 3`" in text
    assert "| TFLOP/s: ours / best peer |" in text and "FlashAttention-2" not in text
    for direction in ("forward", "backward"):
        assert f"| {direction}, d 64, full | 400 / 500 FlashAttention-3 |" in text


def test_a_run_of_one_engine_stays_out_of_the_readme(publish: Any, elsewhere: Path) -> None:
    run = made_up() | {"command": "python -m cupyflash bench --engine mma --json run.json"}
    (elsewhere / "run.json").write_text(json.dumps(run))
    publish.main(elsewhere / "run.json")
    assert (elsewhere / "docs" / "nvidia-h200-mma.json").exists()


def test_a_run_of_float8_has_one_plot(publish: Any, elsewhere: Path) -> None:
    run = made_up() | {"dtype": "float8_e4m3fn"}
    run["rows"] = [row for row in run["rows"] if row["direction"] == "forward"]
    (elsewhere / "run.json").write_text(json.dumps(run))
    publish.main(elsewhere / "run.json")
    names = ["nvidia-h200-float8-forward.png", "nvidia-h200-float8.json"]
    assert sorted(file.name for file in (elsewhere / "docs").iterdir()) == names


def test_a_run_of_decode_is_published(publish: Any, elsewhere: Path) -> None:
    rows = [
        {"shape": shape, "contender": name, "milliseconds": 1.0, "gigabytes_per_second": 4000.0}
        for shape in ("1 x 2", "3 x 4")
        for name in ("contiguous", "fa3")
    ]
    rows.append({"shape": "3 x 4", "contender": "page 16", "milliseconds": None})
    machine = {"device": "NVIDIA H200", "date": "2026-12-01", "command": "bench --json /a/b.json"}
    content = {"machine": machine, "copy_gigabytes_per_second": 4200.0, "results": rows}
    (elsewhere / "run.json").write_text(json.dumps(content))
    publish.main(elsewhere / "run.json")
    names = ["nvidia-h200-decode.json", "nvidia-h200-decode.png"]
    assert sorted(file.name for file in (elsewhere / "docs").iterdir()) == names
    assert "/a" not in (elsewhere / "docs" / names[0]).read_text()


# --- what is no run ------------------------------------------------------------------------------


def refusal(publish: Any, *runs: Path) -> str:
    """Return the one line that it ends with."""
    with pytest.raises(SystemExit) as ended:
        publish.main(*runs)
    message = str(ended.value)
    assert message and "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file or directory"),
        ("", "no JSON"),
        ("[1]", "no run of"),
        ('{"machine": {}, "results": []}', "no run of"),  # that of --features
        (json.dumps(made_up() | {"rows": []}), "no run of"),
        (json.dumps(made_up() | {"rows": [{"milliseconds": 1}]}), "no run of"),
        ('{"machine": {}, "copy_gigabytes_per_second": 1, "results": []}', "no run of"),
    ],
    ids=["missing", "empty", "list", "features", "no rows", "other rows", "no results"],
)
def test_what_is_no_run_is_refused(
    publish: Any, elsewhere: Path, text: str | None, reason: str
) -> None:
    run = elsewhere / "run.json"
    if text is not None:
        run.write_text(text)
    message = refusal(publish, run)
    assert str(run) in message and reason in message
    assert not publish.FOLDER.exists()


def test_the_same_run_twice_is_refused(publish: Any, elsewhere: Path) -> None:
    file = elsewhere / "a.json"
    file.write_text(json.dumps(made_up()))
    assert "a direction each" in refusal(publish, file, file)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float32"},
        {"device": "NVIDIA A100"},
        {"command": "python -m cupyflash bench --shapes 2,512,8,64"},
    ],
)
def test_runs_of_several_kinds_are_refused(
    publish: Any, elsewhere: Path, change: dict[str, str]
) -> None:
    files = [elsewhere / "a.json", elsewhere / "b.json"]
    for file, content in zip(files, (made_up(), made_up() | change), strict=True):
        file.write_text(json.dumps(content))
    assert "--directions alone" in refusal(publish, *files)


def test_without_a_run_it_says_how() -> None:
    script = ROOT / "scripts" / "publish_bench.py"
    done = subprocess.run([sys.executable, script], text=True, capture_output=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "the following arguments are required: RUN.json" in done.stderr
