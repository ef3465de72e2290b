"""Publish a run of ``python -m cupyflash bench --json RUN.json``: ``publish_bench.py RUN.json``.

Writes docs/benchmarks/CARD.json and a plot a direction, and the table between the marks in
README.md. A run of one engine (``--engine``) is CARD-ENGINE.json, one of FP8 CARD-float8.json, and
one of ``--decode`` CARD-decode.json; these stay out of README.md. Runs that differ in
``--directions`` alone may be given together.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path, PurePath
from statistics import geometric_mean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "benchmarks"
BEGIN, END = "<!-- benchmark: by scripts/publish_bench.py -->", "<!-- end of benchmark -->"

sys.path.insert(0, str(ROOT))
from cupyflash.bench.report import LABELS, OURS, best_peer, figure, from_json, races  # noqa: E402
from cupyflash.bench.runner import Result  # noqa: E402
from cupyflash.bench.workloads import DIRECTIONS, MASKS  # noqa: E402

FLASH = "torch-flash"
_SAID = {"device", "dtype", "date", "versions", "command"}


def main(*runs: Path) -> None:
    """Publish a run, or one of each direction."""
    content = together(list(map(read, runs)))
    if "copy_gigabytes_per_second" in content:
        publish_decode(content)
        return
    content["command"] = without_folders(content["command"])
    name = file_name(content)
    keep(name, content)
    results = from_json(content)
    for direction in directions_of(content):
        title = f"{content['device']}, {content['dtype']}, {content['date'][:10]}"
        drawing = figure(results, direction, title)
        drawing.savefig(FOLDER / f"{name}-{direction}.png", dpi=110)
    if variant_of(content) is not None:
        return
    readme = ROOT / "README.md"
    before, _, after = split(readme.read_text(encoding="utf-8"))
    readme.write_text(f"{before}{section(content)}{after}", encoding="utf-8")


def read(run: Path) -> dict[str, Any]:
    """Return what a run has written; ends with one line if the file is none."""
    try:
        content = json.loads(run.read_text(encoding="utf-8"))
    except OSError as error:
        sys.exit(f"{run} cannot be read: {error.strerror}")
    except ValueError as error:
        sys.exit(f"{run} is no JSON: {error}")
    if not is_run(content):
        sys.exit(f"{run} is no run of bench --json, nor of bench --decode --json, with results")
    return dict(content)


def is_run(content: Any) -> bool:
    """Whether it has all that is published."""
    try:
        if "copy_gigabytes_per_second" in content:
            return any(each["milliseconds"] for each in content["results"])
        return content.keys() >= _SAID and bool(from_json(content))
    except (AttributeError, KeyError, TypeError):
        return False


def together(contents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the runs as one; of what they say of the machine, the first one's."""
    first, *others = contents
    if not others:
        return first
    if any("rows" not in each for each in contents) or len(set(map(kind_of, contents))) > 1:
        sys.exit("runs that are published together differ in --directions alone")
    timed = [direction for each in contents for direction in directions_of(each)]
    if len(timed) > len(set(timed)):
        sys.exit("runs that are published together have a direction each")
    command = without_directions(first["command"])
    rows = [row for content in contents for row in content["rows"]]
    return {**first, "command": command, "rows": rows}


def kind_of(content: dict[str, Any]) -> tuple[str, str, str]:
    """Return what runs that are published together share."""
    command = re.sub(r" --json \S+", "", without_directions(content["command"]))
    return file_name(content), content["dtype"], command


def without_directions(command: str) -> str:
    """Return a command line that times all directions."""
    return re.sub(rf" --directions( ({'|'.join(DIRECTIONS)}))+", "", command)


def file_name(content: dict[str, Any]) -> str:
    """Return the name of the card, and variant, as that of a file: one run of each is kept."""
    variant, card = variant_of(content), card_of(content["device"])
    return card if variant is None else f"{card}-{variant}"


def card_of(device: str) -> str:
    """Return the name of a card as part of that of a file."""
    return re.sub(r"\W+", "-", device.lower())


def keep(name: str, content: dict[str, Any]) -> None:
    """Write a run to the folder."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1) + "\n"
    (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")


def variant_of(content: dict[str, Any]) -> str | None:
    """Return the engine that was named, or that it is FP8; None: the fastest, of 16 bits."""
    words = content["command"].split()
    if "--engine" in words:
        return words[words.index("--engine") + 1]
    return "float8" if content["dtype"].startswith("float8") else None


def directions_of(content: dict[str, Any]) -> list[str]:
    """Return the directions that were timed."""
    return [each for each in DIRECTIONS if any(row["direction"] == each for row in content["rows"])]


def publish_decode(content: dict[str, Any]) -> None:
    """Write a run of ``--decode`` and its plot: a group of bars for each shape."""
    from matplotlib.figure import Figure

    machine = content["machine"]
    machine["command"] = without_folders(machine["command"])
    name = f"{card_of(machine['device'])}-decode"
    keep(name, content)
    finished = [each for each in content["results"] if each["milliseconds"]]
    shapes = list(dict.fromkeys(each["shape"] for each in finished))
    contenders = list(dict.fromkeys(each["contender"] for each in finished))
    drawing = Figure(figsize=(10, 4), layout="constrained")
    axes = drawing.subplots()
    width = 0.8 / len(contenders)
    for number, contender in enumerate(contenders):
        bars = [each for each in finished if each["contender"] == contender]
        places = [shapes.index(each["shape"]) + (number + 0.5) * width - 0.4 for each in bars]
        speeds = [each["gigabytes_per_second"] for each in bars]
        axes.bar(places, speeds, width, label=LABELS.get(contender, contender))
    axes.axhline(content["copy_gigabytes_per_second"], color="k", lw=0.8, label="a copy")
    axes.set_xticks(range(len(shapes)), shapes, fontsize=8)
    axes.set_ylabel("GB/s of keys and values")
    axes.set_title(f"One query: {machine['device']}, {machine['date'][:10]}", fontsize=11)
    drawing.legend(loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    drawing.savefig(FOLDER / f"{name}.png", dpi=110)


def without_folders(command: str) -> str:
    """Return a command without the folders of the machine where it ran."""
    return " ".join(PurePath(word).name if "/" in word else word for word in command.split())


def split(readme: str) -> tuple[str, str, str]:
    """Return what is before, between and after the marks; the marks are not between."""
    before, rest = readme.split(f"{BEGIN}\n")
    between, after = rest.split(END)
    return f"{before}{BEGIN}\n", between, f"{END}{after}"


def section(content: dict[str, Any]) -> str:
    """Return the Markdown between the marks."""
    results, name = from_json(content), file_name(content)
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    lines = [
        f"One {content['device']}, {content['dtype']}, {content['date'][:10]}, {versions}."
        f" {facts(results)} `{content['command']}` measures it on your card; every figure is in"
        f" [docs/benchmarks/{name}.json](docs/benchmarks/{name}.json).",
        "",
        *table(results),
        "",
        *(f"![{each}](docs/benchmarks/{name}-{each}.png)" for each in DIRECTIONS),
    ]
    return "\n".join(lines) + "\n"


def facts(results: Sequence[Result]) -> str:
    """Say how far ahead of FlashAttention-2 we are, and of the best peer, in both directions."""
    against_flash = {each: speed_ups(results, each, FLASH) for each in DIRECTIONS}
    against_best = {each: speed_ups(results, each, None) for each in DIRECTIONS}
    parts = (spread(LABELS[FLASH], against_flash), spread("the best peer", against_best))
    return " ".join(part for part in parts if part)


def speed_ups(results: Sequence[Result], direction: str, peer: str | None) -> list[float]:
    """Return a peer's time over ours for each workload; None: that of whoever is the fastest."""
    ratios = []
    for race in races([each for each in results if each.direction == direction]):
        times = {each.contender: each.milliseconds for each in race if each.milliseconds}
        best = best_peer(race)
        other = times.get(peer) if peer else best and best.milliseconds
        if OURS in times and other:
            ratios.append(other / times[OURS])
    return ratios


def spread(name: str, ratios: dict[str, list[float]]) -> str:
    """Say between what the ratios of each direction lie."""
    parts = [
        f"{direction} {min(found):.2f} to {max(found):.2f} (mean {geometric_mean(found):.2f})"
        for direction, found in ratios.items()
        if found
    ]
    return f"Times {name}'s speed: {', '.join(parts)}." if parts else ""


def table(results: Sequence[Result]) -> list[str]:
    """Return a row for each direction, head_dim and mask, and a column for each length."""
    cells: dict[tuple[int, int, bool], dict[int, str]] = {}
    for race in races(results):
        workload = race[0].workload
        row = (DIRECTIONS.index(race[0].direction), workload.head_dim, workload.causal)
        cells.setdefault(row, {})[workload.seqlen_q] = cell(race)
    lengths = sorted({length for row in cells.values() for length in row})
    columns = ["ours", LABELS[FLASH], "best peer"]
    if not any(each.contender == FLASH for each in results):
        del columns[1]
    lines = [
        f"| TFLOP/s: {' / '.join(columns)} | {' | '.join(map(str, lengths))} |",
        f"|{'---|' * (1 + len(lengths))}",
    ]
    for (direction, head_dim, causal), row in sorted(cells.items()):
        kind = f"{DIRECTIONS[direction]}, d {head_dim}, {MASKS[causal]}"
        lines.append(f"| {kind} | {' | '.join(row.get(each, '') for each in lengths)} |")
    return lines


def cell(race: Sequence[Result]) -> str:
    """Return ours, FlashAttention-2's and the best peer's speed, with the latter's name."""
    speeds = {each.contender: each.tflops for each in race if each.tflops}
    best = best_peer(race)
    shown = [OURS, FLASH] if any(each.contender == FLASH for each in race) else [OURS]
    found = [f"{speeds[name]:.0f}" if name in speeds else "-" for name in shown]
    if best is not None and best.contender != FLASH:
        found.append(f"{best.tflops:.0f} {LABELS.get(best.contender, best.contender)}")
    return " / ".join(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.json")
    main(*parser.parse_args().runs)
