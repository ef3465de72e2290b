"""One workload: everybody is checked, then those who are right take turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from cupyflash.bench.inputs import TOLERANCE, Inputs, disagreement, reference_rows, sampled
from cupyflash.bench.peers import Contender
from cupyflash.bench.workloads import DIRECTIONS, Workload

__all__ = ["Result", "Stopwatch", "race"]

Work = Callable[[], Any]


@dataclass(frozen=True)
class Result:
    """What one contender did with one workload in one direction.

    Either `milliseconds` and `extra_bytes` are given, or `error` says why not.
    """

    workload: Workload
    direction: str
    contender: str
    milliseconds: float | None = None
    extra_bytes: int | None = None
    error: str | None = None

    @property
    def tflops(self) -> float | None:
        """Return 10^12 operations a second."""
        if self.milliseconds is None:
            return None
        return self.workload.flops(self.direction) / self.milliseconds / 1e9


@dataclass(frozen=True)
class Stopwatch:
    """How to measure: `milliseconds` lets works take turns, `extra_bytes` looks at one call."""

    milliseconds: Callable[[Mapping[str, Work]], Mapping[str, float]]
    extra_bytes: Callable[[Work], int]


def race(
    workload: Workload,
    direction: str,
    contenders: Sequence[Contender],
    copies: Sequence[Inputs],
    stopwatch: Stopwatch,
) -> list[Result]:
    """Return one result for each contender that supports `workload`, in their order.

    Parameters
    ----------
    workload : Workload
    direction : "forward" or "backward"
    contenders : sequence of Contender
        Ours first: everything is compared with what the first that is right returns, and some
        rows of out or dq, which can be had for little, with dense attention in float64.
    copies : sequence of Inputs
        Every call takes the next, so that the second level cache holds none of it.
    stopwatch : Stopwatch
    """
    racing = [each for each in contenders if each.supports(workload)]
    judge = _Judge(workload, direction, copies[0])
    errors: dict[str, str] = {}
    memory: dict[str, int] = {}
    works: dict[str, Work] = {}

    def prepare(contender: Contender) -> None:
        try:
            prepared = [getattr(contender, direction)(workload, inputs) for inputs in copies]
            judge.check(contender.arrays(prepared[0]()))
            memory[contender.name] = stopwatch.extra_bytes(prepared[0])
            works[contender.name] = _rotated(prepared)
        except Exception as error:  # whatever other people's code raises is its result
            errors[contender.name] = f"{type(error).__name__}: {error}"

    for contender in racing:
        prepare(contender)
    times: Mapping[str, float] = {}
    try:
        times = stopwatch.milliseconds(works) if works else {}
    except Exception as error:  # all of them share the memory, so nobody knows whose fault it is
        errors |= dict.fromkeys(works, f"timing failed: {type(error).__name__}: {error}")
    return [
        Result(
            workload,
            direction,
            contender.name,
            times.get(contender.name),
            memory.get(contender.name) if contender.name in times else None,
            errors.get(contender.name),
        )
        for contender in racing
    ]


class _Judge:
    """Knows what is right for one workload."""

    def __init__(self, workload: Workload, direction: str, inputs: Inputs) -> None:
        self.workload = workload
        self.rows = reference_rows(workload, inputs)[DIRECTIONS.index(direction)]
        self.whole: Sequence[Any] | None = None  # of the first that was right

    def check(self, arrays: Sequence[Any]) -> None:
        """Raise ArithmeticError if `arrays`, (out,) or (dq, dk, dv), are wrong."""
        tolerance = TOLERANCE[self.workload.dtype]
        expected = [self.rows, *(arrays if self.whole is None else self.whole)]
        error = disagreement([sampled(self.workload, arrays[0]), *arrays], expected)
        if not error <= tolerance:
            raise ArithmeticError(f"wrong by {error:.2g} of the norm, {tolerance:g} is allowed")
        if self.whole is None:
            self.whole = arrays


def _rotated(works: Sequence[Work]) -> Work:
    if len(works) == 1:
        return works[0]
    turns = cycle(works)
    return lambda: next(turns)()
