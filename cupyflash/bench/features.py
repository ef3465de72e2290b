"""``bench --features``: what each feature costs, beside the same call without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import cupyflash
from cupyflash._arrays import place_of
from cupyflash.bench import flex_peer
from cupyflash.bench.inputs import Inputs, normal
from cupyflash.bench.runner import Work
from cupyflash.bench.workloads import Workload

__all__ = ["FEATURES", "FeatureResult", "header", "line", "measure"]

Array = Any
Options = dict[str, Any]

PLAIN = "plain"
_WINDOW = 512
_SOFTCAP = 30.0
_DROPOUT_P = 0.1
_BLOCK = 128


@dataclass(frozen=True)
class Feature:
    """A row of the table.

    Parameters
    ----------
    name : str
    options : callable
        Makes the arguments of a call.
    score : callable, optional
        The same for the peer ``torch-flex``: from the options as tensors to its ``score_mod``.
    varlen : bool
        The sequences are packed, all equally long.
    """

    name: str
    options: Callable[[Workload, Inputs], Options]
    score: Callable[[Mapping[str, Any]], flex_peer.ScoreMod] | None = None
    varlen: bool = False


@dataclass(frozen=True)
class FeatureResult:
    """What a feature took in one direction; either the times or `error` are given."""

    workload: str
    direction: str
    feature: str
    milliseconds: float | None = None
    plain_milliseconds: float | None = None  # of the same call without it
    flex_milliseconds: float | None = None
    flex_error: str | None = None
    error: str | None = None

    @property
    def slow_down(self) -> float | None:
        """Return the time over that of the plain call."""
        if self.milliseconds is None or self.plain_milliseconds is None:
            return None
        return self.milliseconds / self.plain_milliseconds


def _window(workload: Workload, inputs: Inputs) -> Options:
    return {"window": (_WINDOW, 0)}


def _padding(workload: Workload, inputs: Inputs) -> Options:
    xp = place_of(inputs.query).namespace
    lengths = workload.seqlen_k - 37 * xp.arange(1, workload.batch + 1)
    mask = xp.arange(workload.seqlen_k) < lengths[:, None, None, None]
    return {"mask": mask}


def _mask(workload: Workload, inputs: Inputs) -> Options:
    xp = place_of(inputs.query).namespace
    return {"mask": xp.random.random((workload.seqlen_q, workload.seqlen_k)) < 0.5}


def _blocks(workload: Workload, inputs: Inputs) -> Options:
    xp = place_of(inputs.query).namespace
    rows, cols = (-(-n // _BLOCK) for n in (workload.seqlen_q, workload.seqlen_k))
    blocks = (xp.arange(rows)[:, None] + xp.arange(cols)) % 2 == 0
    return {"block_mask": cupyflash.BlockMask(blocks[None, None], (_BLOCK, _BLOCK))}


def _bias(workload: Workload, inputs: Inputs, batch: int = 1) -> Options:
    shape = (batch or workload.batch, workload.num_heads, workload.seqlen_q, workload.seqlen_k)
    return {"bias": normal(shape, workload.dtype)}


def _alibi(workload: Workload, inputs: Inputs) -> Options:
    xp = place_of(inputs.query).namespace
    return {"alibi_slopes": 2.0 ** -xp.linspace(1, 8, workload.num_heads, dtype="float32")}


def _sinks(workload: Workload, inputs: Inputs) -> Options:
    return {"sinks": place_of(inputs.query).namespace.zeros(workload.num_heads, "float32")}


FEATURES: tuple[Feature, ...] = (
    Feature(f"window ({_WINDOW}, 0)", _window),
    Feature("padding mask (b, 1, 1, sk)", _padding),
    Feature("mask (sq, sk), half hidden", _mask),
    Feature("block mask, half hidden", _blocks),
    Feature(f"softcap {_SOFTCAP:g}", lambda *_: {"softcap": _SOFTCAP}, flex_peer.cap_scores),
    Feature("ALiBi (h,)", _alibi),
    Feature("bias (1, h, sq, sk)", _bias, flex_peer.add_bias),
    Feature("bias (b, h, sq, sk)", partial(_bias, batch=0), flex_peer.add_bias),
    Feature(f"dropout {_DROPOUT_P:g}", lambda *_: {"dropout_p": _DROPOUT_P, "seed": 1}),
    Feature("sinks (h,)", _sinks),
    Feature("varlen, equal lengths", lambda *_: {}, varlen=True),
)


def measure(
    workload: Workload,
    direction: str,
    inputs: Inputs,
    engine: str | None,
    flex: bool,
    milliseconds: Callable[[Mapping[str, Work]], Mapping[str, float]],
) -> list[FeatureResult]:
    """Return a result for each of `FEATURES`, which takes turns with the call without it.

    Parameters
    ----------
    workload, direction, inputs
        What is computed.
    engine : str or None
        Ours; None: the fastest that serves a feature.
    flex : bool
        Whether the peer ``torch-flex`` takes its turns too.
    milliseconds : callable
        As in `runner.Stopwatch`.
    """
    plain = _ours({}, False, workload, inputs, engine)[direction]()

    def result(feature: Feature) -> FeatureResult:
        name = (workload.name, direction, feature.name)
        flex_error = None
        try:
            options = feature.options(workload, inputs)
            ours = _ours(options, feature.varlen, workload, inputs, engine)[direction]()
            works, first = {PLAIN: plain, feature.name: ours}, ours()
            if flex and feature.score is not None:
                try:
                    theirs = flex_peer.prepare(feature.score, workload, inputs, options)
                    works[flex_peer.NAME] = theirs[direction]()
                    flex_peer.check(workload, first, works[flex_peer.NAME]())
                except Exception as error:  # ours are timed whatever a peer does
                    works.pop(flex_peer.NAME, None)
                    flex_error = _text(error)
            del first
            times = milliseconds(works)
        except Exception as error:  # the table is to be whole whatever one row does
            return FeatureResult(*name, error=_text(error))
        mine, other = times[feature.name], times.get(flex_peer.NAME)
        return FeatureResult(*name, mine, times[PLAIN], other, flex_error)

    return [result(feature) for feature in FEATURES]


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _ours(
    given: Options, varlen: bool, workload: Workload, inputs: Inputs, engine: str | None
) -> dict[str, Callable[[], Work]]:
    """Return what prepares each direction."""
    options = given | {"causal": workload.causal, "engine": engine}
    if "window" in options:
        options["causal"] = False
    arrays: list[Any] = [inputs.query, inputs.key, inputs.value]
    grad_out = inputs.grad_out
    run: Callable[..., Any]
    save: Callable[..., Any]
    run, save = cupyflash.flash_attention, cupyflash.flash_attention_forward
    if varlen:
        xp = place_of(inputs.query).namespace
        lengths = (workload.seqlen_q, workload.seqlen_k)
        packed = [x.reshape(-1, *x.shape[2:]) for x in (*arrays, grad_out)]
        arrays = packed[:3] + [xp.arange(workload.batch + 1, dtype="int32") * n for n in lengths]
        grad_out, run = packed[3], cupyflash.flash_attention_varlen
        save = cupyflash.flash_attention_varlen_forward

    def backward() -> Work:
        _, saved = save(*arrays, **options)
        return lambda: cupyflash.flash_attention_backward(grad_out, saved)

    return {"forward": lambda: lambda: run(*arrays, **options), "backward": backward}


def header() -> str:
    """Return the first lines of the table."""
    return f"| feature | direction | ms | slow-down | {flex_peer.NAME}, ms |\n|---|---|---|---|---|"


def line(result: FeatureResult) -> str:
    """Return a row of the table."""
    if result.error is not None:
        return f"| {result.feature} | {result.direction} | {_short(result.error)} |"
    flex = _short(result.flex_error or "")
    if result.flex_milliseconds is not None:
        flex = f"{result.flex_milliseconds:.3f}"
    return (
        f"| {result.feature} | {result.direction} | {result.milliseconds:.3f} |"
        f" {result.slow_down:.3f} | {flex} |"
    )


def _short(error: str) -> str:
    return " ".join(error.split())[:200]


def to_json(results: Sequence[FeatureResult], machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything."""
    rows = [asdict(each) | {"slow_down": each.slow_down} for each in results]
    return {"machine": dict(machine), "results": rows}
