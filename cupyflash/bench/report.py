"""What comes out of a run: a table, a dict for JSON, and plots. Pure functions of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from itertools import groupby
from typing import Any

from cupyflash.bench.runner import Result
from cupyflash.bench.workloads import MASKS, Workload

__all__ = [
    "LABELS",
    "best_peer",
    "figure",
    "from_json",
    "header",
    "lines",
    "ratio",
    "table",
    "to_json",
]

OURS = "cupyflash"
LABELS = {  # what a contender's name means to somebody who has not read `peers`
    "naive-cupy": "naive CuPy",
    "materialised": "cuBLAS and softmax",
    "torch-flash": "FlashAttention-2",
    "torch-cudnn": "cuDNN",
    "fa3": "FlashAttention-3",
    "fa3-ffi": "FlashAttention-3 (FFI)",
    "fa4": "FlashAttention-4",
    "cudnn-frontend": "cuDNN's front end",
}
_NONE = "-"


def best_peer(results: Sequence[Result]) -> Result | None:
    """Return the fastest of one workload and direction that is not ours."""
    finished = [each for each in results if each.milliseconds and each.contender != OURS]
    return min(finished, key=lambda each: each.milliseconds or 0.0, default=None)


def ratio(results: Sequence[Result]) -> float | None:
    """Return our speed over the best peer's, for one workload and direction."""
    ours, best = _ours(results), best_peer(results)
    if ours is None or best is None or not ours.milliseconds or not best.milliseconds:
        return None
    return best.milliseconds / ours.milliseconds


def header(contenders: Sequence[str]) -> str:
    """Return the heading of `lines`: TFLOP/s of each, then what concerns ours."""
    speeds = "  ".join(f"{name:>{_width(name)}}" for name in contenders)
    return f"{'b x s x h x d':<34} {'':<8}  {speeds}   ratio  ceiling  extra MB (best peer's)"


def lines(
    results: Sequence[Result],
    contenders: Sequence[str],
    ceiling: float | None = None,
    earlier: Sequence[Result] = (),
) -> str:
    """Return the row of one workload and direction, and a line for each new failure.

    Parameters
    ----------
    results : sequence of Result
        Of one workload and direction.
    contenders : sequence of str
        The columns.
    ceiling : float, optional
        TFLOP/s of the card's matrix product, of which ours is given as a share.
    earlier : sequence of Result
        Of rows above: a peer that lacks something says so once.
    """
    found = {each.contender: each for each in results}
    speeds = "  ".join(
        f"{_number(found[name].tflops if name in found else None):>{_width(name)}}"
        for name in contenders
    )
    ours, best = _ours(results), best_peer(results)
    tflops = ours and ours.tflops
    share = tflops / ceiling if tflops and ceiling else None
    memory = f"{_megabytes(ours)} ({_megabytes(best)})"
    row = (
        f"{results[0].workload.name:<34} {results[0].direction:<8}  {speeds}"
        f"   {_number(ratio(results), '.2f'):>5}  {_number(share, '.0%'):>7}  {memory}"
    )
    told = {(each.contender, each.error) for each in earlier}
    failures = [
        f"  {each.contender}: {_one_line(each.error)}"
        for each in results
        if each.error and (each.contender, each.error) not in told
    ]
    return "\n".join([row, *failures])


def table(
    results: Sequence[Result], contenders: Sequence[str], ceiling: float | None = None
) -> str:
    """Return the whole table."""
    rows, earlier = [header(contenders)], list[Result]()
    for each in races(results):
        rows.append(lines(each, contenders, ceiling, earlier))
        earlier += each
    return "\n".join(rows)


def races(results: Sequence[Result]) -> list[list[Result]]:
    """Group what ran side by side; such results are neighbours."""
    return [
        list(group) for _, group in groupby(results, lambda each: (each.workload, each.direction))
    ]


def to_json(
    results: Sequence[Result], machine: Mapping[str, Any], ceiling: float | None = None
) -> dict[str, Any]:
    """Return a dict that JSON can hold: what is known of the machine, and a row a result."""
    rows: list[dict[str, Any]] = []
    for race in races(results):
        best = best_peer(race)
        for each in race:
            rows.append(
                asdict(each.workload)
                | {
                    "direction": each.direction,
                    "contender": each.contender,
                    "milliseconds": each.milliseconds,
                    "tflops": each.tflops,
                    "share_of_ceiling": each.tflops / ceiling if each.tflops and ceiling else None,
                    "extra_bytes": each.extra_bytes,
                    "error": each.error,
                }
            )
            if each.contender == OURS:
                rows[-1]["ratio_to_best_peer"] = ratio(race)
                rows[-1]["best_peer"] = best and best.contender
    return {**machine, "ceiling_tflops": ceiling, "rows": rows}


def from_json(content: Mapping[str, Any]) -> list[Result]:
    """Return the results that `to_json` has written."""
    return [
        Result(
            Workload(**{each.name: row[each.name] for each in fields(Workload)}),
            **{each.name: row[each.name] for each in fields(Result) if each.name != "workload"},
        )
        for row in content["rows"]
    ]


def figure(results: Sequence[Result], direction: str, title: str) -> Any:
    """Draw TFLOP/s over length: a panel for each head_dim, full and causal, a line a contender.

    Returns
    -------
    matplotlib.figure.Figure
        Drawn without pyplot, so neither a display nor a backend is needed.
    """
    from matplotlib.figure import Figure

    finished = [each for each in results if each.direction == direction and each.tflops]
    contenders = list(dict.fromkeys(each.contender for each in finished))
    head_dims = sorted({each.workload.head_dim for each in finished})
    kinds = sorted({each.workload.causal for each in finished})
    rows, columns = max(1, len(kinds)), max(1, len(head_dims))
    drawing = Figure(figsize=(0.8 + 2.9 * columns, 1.3 + 2.3 * rows), layout="constrained")
    panels = drawing.subplots(rows, columns, squeeze=False, sharey=True)
    for row, causal in zip(panels, kinds, strict=False):
        for axes, head_dim in zip(row, head_dims, strict=False):
            panel = [
                each
                for each in finished
                if (each.workload.head_dim, each.workload.causal) == (head_dim, causal)
            ]
            _draw(axes, panel, contenders)
            axes.set_title(f"head_dim {head_dim}, {MASKS[causal]}", fontsize=9)
    drawing.suptitle(f"Attention {direction}: {title}", fontsize=11)
    drawing.supylabel("TFLOP/s (higher is faster; causal counts as half)", fontsize=9)
    for axes in panels[-1]:
        axes.set_xlabel("sequence length", fontsize=9)
    panels[0][0].set_ylim(bottom=0)  # of all panels, once everything is drawn
    if contenders:
        lines, names = panels[0][0].get_legend_handles_labels()
        labels = [LABELS.get(name, name) for name in names]
        drawing.legend(
            lines, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False
        )
    return drawing


def _draw(axes: Any, panel: Sequence[Result], contenders: Sequence[str]) -> None:
    for number, name in enumerate(contenders):
        points = sorted(
            (each.workload.seqlen_q, each.tflops) for each in panel if each.contender == name
        )
        lengths, speeds = [x for x, _ in points], [y for _, y in points]
        width = 2.4 if name == OURS else 1.2
        axes.plot(lengths, speeds, "o-", ms=3, lw=width, color=f"C{number}", label=name)
    lengths = sorted({each.workload.seqlen_q for each in panel})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [_short(each) for each in lengths])
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)


def _short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def _ours(results: Sequence[Result]) -> Result | None:
    return next((each for each in results if each.contender == OURS), None)


def _width(contender: str) -> int:
    return max(5, len(contender))


def _number(value: float | None, form: str = "") -> str:
    if value is None:
        return _NONE
    return f"{value:{form or ('.0f' if value >= 100 else '.1f')}}"


def _megabytes(result: Result | None) -> str:
    if result is None or result.extra_bytes is None:
        return _NONE
    return f"{result.extra_bytes / 1e6:.0f}"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())[:200]
