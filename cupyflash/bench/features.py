"""``bench --features``: what each feature costs, beside the same call without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from typing import Any

import cupyflash
from cupyflash._arrays import place_of
from cupyflash.bench.inputs import TOLERANCE, Inputs, disagreement, normal
from cupyflash.bench.runner import Work
from cupyflash.bench.torch_peers import cannot_import, cupy_arrays, tensors
from cupyflash.bench.workloads import Workload

__all__ = ["FEATURES", "FeatureResult", "header", "line", "measure"]

Array = Any
Options = dict[str, Any]
Tensor = Any

PLAIN = "plain"
FLEX = "FlexAttention"
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
        The same for PyTorch's FlexAttention: from the options as tensors to its ``score_mod``.
    varlen : bool
        The sequences are packed, all equally long.
    """

    name: str
    options: Callable[[Workload, Inputs], Options]
    score: Callable[[Mapping[str, Any]], Callable[..., Tensor]] | None = None
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


def _flex_softcap(options: Mapping[str, Any]) -> Callable[..., Tensor]:
    tanh = import_module("torch").tanh
    return lambda score, b, h, i, j: _SOFTCAP * tanh(score / _SOFTCAP)


def _flex_bias(options: Mapping[str, Any]) -> Callable[..., Tensor]:
    bias = options["bias"]
    if len(bias) == 1:
        return lambda score, b, h, i, j: score + bias[0, h, i, j]
    return lambda score, b, h, i, j: score + bias[b, h, i, j]


FEATURES: tuple[Feature, ...] = (
    Feature(f"window ({_WINDOW}, 0)", _window),
    Feature("padding mask (b, 1, 1, sk)", _padding),
    Feature("mask (sq, sk), half hidden", _mask),
    Feature("block mask, half hidden", _blocks),
    Feature(f"softcap {_SOFTCAP:g}", lambda *_: {"softcap": _SOFTCAP}, _flex_softcap),
    Feature("ALiBi (h,)", _alibi),
    Feature("bias (1, h, sq, sk)", _bias, _flex_bias),
    Feature("bias (b, h, sq, sk)", partial(_bias, batch=0), _flex_bias),
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
        Whether PyTorch's FlexAttention takes its turns too.
    milliseconds : callable
        As in `runner.Stopwatch`.
    """
    plain = _ours(Feature(PLAIN, lambda *_: {}), workload, inputs, engine)[direction]()

    def result(feature: Feature) -> FeatureResult:
        name = (workload.name, direction, feature.name)
        try:
            works = {
                PLAIN: plain,
                feature.name: _ours(feature, workload, inputs, engine)[direction](),
            }
            first = works[feature.name]()
            if flex and feature.score is not None:
                works[FLEX] = _flex(feature, workload, inputs)[direction]()
                _compare(workload, first, works[FLEX]())
            del first
            times = milliseconds(works)
        except Exception as error:  # the table is to be whole whatever one row does
            return FeatureResult(*name, error=f"{type(error).__name__}: {error}")
        ours = times[feature.name]
        return FeatureResult(*name, ours, times[PLAIN], times.get(FLEX))

    return [result(feature) for feature in FEATURES]


def _ours(
    feature: Feature, workload: Workload, inputs: Inputs, engine: str | None
) -> dict[str, Callable[[], Work]]:
    """Return what prepares each direction."""
    options = feature.options(workload, inputs) | {"causal": workload.causal, "engine": engine}
    if "window" in options:
        options["causal"] = False
    arrays: list[Any] = [inputs.query, inputs.key, inputs.value]
    grad_out = inputs.grad_out
    run: Callable[..., Any]
    save: Callable[..., Any]
    run, save = cupyflash.flash_attention, cupyflash.flash_attention_forward
    if feature.varlen:
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


def _flex(feature: Feature, workload: Workload, inputs: Inputs) -> dict[str, Callable[[], Work]]:
    """The same by PyTorch's compiled FlexAttention, gradients of a bias included."""
    torch = import_module("torch")
    module = import_module("torch.nn.attention.flex_attention")
    compiled = torch.compile(module.flex_attention, dynamic=False)
    *given, grad_out = tensors(inputs)
    options = feature.options(workload, inputs)
    if "bias" in options:
        options["bias"] = torch.from_dlpack(options["bias"])

    def attend() -> Tensor:
        assert feature.score is not None
        query, key, value = (each.transpose(1, 2) for each in given)
        return compiled(query, key, value, score_mod=feature.score(options)).transpose(1, 2)

    def backward() -> Work:
        leaves = [*given, *(value for value in options.values() if torch.is_tensor(value))]
        for each in leaves:
            each.requires_grad_()
        out = attend()
        return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

    return {"forward": lambda: attend, "backward": backward}


def _compare(workload: Workload, ours: Any, theirs: Any) -> None:
    """Raise ArithmeticError if FlexAttention computes something else."""
    mine = [ours] if hasattr(ours, "shape") else list(ours[:3])
    error = disagreement(mine, cupy_arrays(theirs)[: len(mine)])
    if not error <= 2 * TOLERANCE[workload.dtype]:
        raise ArithmeticError(f"{FLEX} differs by {error:.2g} of the norm")


def flex_missing() -> str | None:
    """Return why FlexAttention cannot take part."""
    return cannot_import("torch.nn.attention.flex_attention")


def header() -> str:
    """Return the first lines of the table."""
    return f"| feature | direction | ms | slow-down | {FLEX}, ms |\n|---|---|---|---|---|"


def line(result: FeatureResult) -> str:
    """Return a row of the table."""
    if result.error is not None:
        return f"| {result.feature} | {result.direction} | {' '.join(result.error.split())[:200]} |"
    flex = "" if result.flex_milliseconds is None else f"{result.flex_milliseconds:.3f}"
    return (
        f"| {result.feature} | {result.direction} | {result.milliseconds:.3f} |"
        f" {result.slow_down:.3f} | {flex} |"
    )


def to_json(results: Sequence[FeatureResult], machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything."""
    rows = [asdict(each) | {"slow_down": each.slow_down} for each in results]
    return {"machine": dict(machine), "results": rows}
