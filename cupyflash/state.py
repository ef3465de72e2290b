"""What a forward call keeps for the backward, and what the backward returns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupyflash._arrays import describe
from cupyflash._options import Options

if TYPE_CHECKING:
    from cupyflash._validate import Call

__all__ = ["Gradients", "SavedState"]

Array = Any


@dataclass(frozen=True, eq=False, repr=False)
class SavedState:
    """Inputs, output and softmax statistics of one forward call.

    Attributes
    ----------
    q, k, v, out : array
        As the caller gave them and got it.
    row_max : array, shape ``(b, h, sq)`` (varlen: ``(h, total_q)``)
        m: the largest score that each query sees, natural units; -inf where it sees no key.
        float32 (float64 for float64 input).
    row_sum : array of the same shape
        l: the sum over visible keys of ``exp(score - m)``.
    options : Options
        Everything the call was given by keyword.

    Notes
    -----
    These are the statistics of FlashAttention (Dao et al. 2022, arXiv 2205.14135, Algorithm 1).
    Nothing of size ``sq * sk`` is kept, and nothing is copied: do not write into these arrays
    before the backward.
    """

    q: Array
    k: Array
    v: Array
    out: Array
    row_max: Array
    row_sum: Array
    options: Options
    _call: Call

    def __repr__(self) -> str:
        names = ("q", "k", "v", "out", "row_max", "row_sum")
        arrays = ", ".join(f"{name}: {describe(getattr(self, name))}" for name in names)
        given = ", ".join(
            f"{name}={shown}"
            for name, value in self.options._asdict().items()
            if (shown := _shown(value)) != _shown(Options._field_defaults[name])
        )
        return f"SavedState({arrays}; {given or 'no options'})"

    @property
    def seed(self) -> Any:
        """The dropout seed that was used: the one given, or the one drawn."""
        return self.options.seed

    @cached_property
    def lse(self) -> Array:
        """``log(sum(exp(score)))`` = ``m + log(l)``, natural log; -inf where no key is seen."""
        xp = self._call.place.namespace
        with self._call.place.current(), np.errstate(divide="ignore"):
            return self.row_max + xp.log(self.row_sum)


def _shown(value: Any) -> str:
    return f"array of {describe(value)}" if hasattr(value, "shape") else repr(value)


class Gradients(NamedTuple):
    """Gradients of one call; None where a part does not apply."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None = None
    dsinks: Array | None = None
    dscore_params: dict[str, Array] | None = None
