"""``bench --tune``: every legal tile of an engine takes its turn, and the winner is remembered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cupyflash import _engines
from cupyflash._arrays import place_of
from cupyflash._cuda import tuned
from cupyflash._cuda.candidates import candidates
from cupyflash._cuda.device import Device
from cupyflash._cuda.tuned import Tile
from cupyflash._problem import GradientBuffers, Operands, Problem
from cupyflash.bench.inputs import Inputs
from cupyflash.bench.runner import Result, Stopwatch, race
from cupyflash.bench.workloads import Workload

__all__ = ["Tiled", "problem_of", "tune_tiles"]

Array = Any
Saved = Sequence[Array]  # out, row_max, row_sum

DEFAULT = "default"
_FINALISTS = 3
_MARGIN = 0.98  # of the default's time: one run differs from another by a per cent or so


class Tiled:
    """An engine of ours with one tile; None: the default.

    `saved` is what the default forward of some inputs has saved: tiles of the backward share it.
    """

    def __init__(self, engine: str, tile: Tile | None, saved: dict[Inputs, Saved]) -> None:
        self.engine = engine
        self.tile = tile
        self.saved = saved
        self.name = DEFAULT if tile is None else repr(tile)

    def available(self) -> str | None:
        """Return None: `tune` is called where there is a GPU."""
        return None

    def supports(self, workload: Workload) -> bool:
        """Return True: only legal tiles take part."""
        return True

    def forward(self, workload: Workload, inputs: Inputs) -> Callable[[], Saved]:
        """Return what computes out, row_max and row_sum."""
        problem, operands = problem_of(workload), Operands(inputs.query, inputs.key, inputs.value)
        run, xp = _engines.forward(self.engine), place_of(inputs.query).namespace
        rows = (workload.batch, workload.num_heads, workload.seqlen_q)

        def work() -> Saved:
            out = xp.empty_like(inputs.query)
            row_max, row_sum = (xp.empty(rows, problem.accumulator_dtype) for _ in range(2))
            run(problem, operands, self.tile, out, row_max, row_sum)
            return out, row_max, row_sum

        return work

    def backward(self, workload: Workload, inputs: Inputs) -> Callable[[], Sequence[Array]]:
        """Return what computes (dq, dk, dv) from what the default forward has saved."""
        problem, operands = problem_of(workload), Operands(inputs.query, inputs.key, inputs.value)
        if inputs not in self.saved:
            self.saved[inputs] = Tiled(self.engine, None, {}).forward(workload, inputs)()
        saved = self.saved[inputs]
        run, xp = _engines.backward(self.engine), place_of(inputs.query).namespace

        def work() -> Sequence[Array]:
            dq, dk, dv = map(xp.empty_like, (inputs.query, inputs.key, inputs.value))
            buffers = GradientBuffers(dq, dk, dv)
            run(problem, operands, self.tile, *saved, inputs.grad_out, None, buffers, False)
            return dq, dk, dv

        return work

    def arrays(self, result: Any) -> Sequence[Array]:
        """Return (out,) or (dq, dk, dv); statistics are no ``(b, s, h, d)`` arrays."""
        return [each for each in result if each.ndim == 4]


def problem_of(workload: Workload) -> Problem:
    """Return what our public functions ask of an engine for this workload."""
    return Problem(
        workload.dtype,
        workload.batch,
        workload.seqlen_q,
        workload.seqlen_k,
        workload.num_heads,
        workload.num_heads_kv,
        workload.head_dim,
        workload.head_dim,
        workload.head_dim**-0.5,
        window_right=0 if workload.causal else None,
        out_dtype=workload.dtype,
    )


def tune_tiles(
    workload: Workload,
    direction: str,
    engine: str,
    device: Device,
    copies: Sequence[Inputs],
    stopwatch: Stopwatch,
) -> str:
    """Time every legal tile beside the default, remember the fastest, return the table.

    Parameters are those of `runner.race`, and the engine. A tile that computes something else than
    the default, or does not compile, is left out. The best meet the default once more, as of many
    equal ones the luckiest looks best.
    """
    problem = problem_of(workload)
    tuned.forget(engine, direction, problem, device)  # so that the default is the engine's own
    tiles = candidates(engine, direction, problem, device)
    saved: dict[Inputs, Saved] = {}
    every = [Tiled(engine, tile, saved) for tile in (None, *tiles)]
    contenders = {each.name: each for each in every}
    heats = race(workload, direction, list(contenders.values()), copies, stopwatch)
    best = [each.contender for each in _ranked(heats) if each.contender != DEFAULT][:_FINALISTS]
    finalists = [contenders[name] for name in (DEFAULT, *best)]
    final = race(workload, direction, finalists, copies, stopwatch)
    winner = contenders[_winner(final)].tile
    outcome = "the default stays"
    if winner is not None:
        kept = tuned.remember(engine, direction, problem, device, winner)
        outcome = f"{'remembered' if kept else 'not kept'}: {winner!r}"
    title = f"{workload.name}, {direction}, engine {engine}: {len(heats)} tiles"
    return "\n".join([title, *_table(heats), "the best once more", *_table(final), outcome])


def _ranked(results: Sequence[Result]) -> list[Result]:
    """Return those that were right, the fastest first."""
    finished = [each for each in results if each.milliseconds is not None]
    return sorted(finished, key=lambda each: each.milliseconds or 0.0)


def _winner(results: Sequence[Result]) -> str:
    """Return the fastest, or the default if nobody is clearly faster."""
    times = {each.contender: each.milliseconds for each in _ranked(results)}
    best = next(iter(times), DEFAULT)
    best_time, default_time = times.get(best), times.get(DEFAULT)
    if best_time and default_time and best_time > _MARGIN * default_time:
        return DEFAULT
    return best


def _table(results: Sequence[Result]) -> list[str]:
    """Return tile, milliseconds, and the default's time over it; then who failed."""
    ranked = _ranked(results)
    default = next((x.milliseconds for x in ranked if x.contender == DEFAULT), None)
    width = max(len(each.contender) for each in results)
    lines = [f"  {'tile':<{width}}  {'ms':>8}  {'TFLOP/s':>8}  {'speed-up':>8}"]
    for each in ranked:
        milliseconds = each.milliseconds or 0.0
        ratio = f"{default / milliseconds:.3f}" if default else "-"
        lines.append(
            f"  {each.contender:<{width}}  {milliseconds:8.3f}  {each.tflops:8.1f}  {ratio:>8}"
        )
    failed = [each for each in results if each.error]
    return lines + [f"  {x.contender}: {' '.join((x.error or '').split())[:200]}" for x in failed]
