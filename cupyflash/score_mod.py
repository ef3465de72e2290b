"""`ScoreMod`: a user-written change of the scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cupyflash._arrays import describe

__all__ = ["ScoreMod"]


@dataclass(frozen=True, eq=False, repr=False)
class ScoreMod:
    """A change of each score before masking.

    Parameters
    ----------
    forward : str
        CUDA expression for the new score, over ``score, b, h, i, j`` and the names in `params`.
    backward : str, optional
        CUDA expression for the factor d new / d score, over the same names. Default: `forward`
        is differentiated (forward mode, by dual numbers).
    params : mapping of str to array
        Named arrays that the expressions and callables may read, on the device of the call. GPU
        engines take up to 8, of integers, bool, or floats; floating ones have gradients,
        ``dscore_params`` of `Gradients`, in the accumulator dtype.
    numpy_forward : callable, optional
        ``numpy_forward(score, b, h, i, j, **params)`` returns the new scores of one tile, for host
        arrays. ``score`` is ``(rows, cols)``; ``b`` and ``h`` are ints, ``i`` ``(rows, 1)`` and
        ``j`` ``(1, cols)`` integer arrays.
    numpy_backward : callable, optional
        Same arguments (``score`` is the score *before* the change); returns the factor
        d new / d score (broadcastable), or ``(factor, {name: (index, dnew_dparam)})`` where
        ``params[name][index]`` are the elements that each score read (index: a tuple of
        broadcastable integer arrays) and ``dnew_dparam`` the derivative by them.

    Raises
    ------
    TypeError
        An expression is no str, a callable cannot be called, or `params` maps no names.

    Notes
    -----
    In expressions, ``score`` is a float (double in float64 calls), after softcap, bias and ALiBi;
    ``b, h, i, j`` are ints: batch (varlen: entry), query head, query and key, counted inside the
    sequence. A new score of ``-INFINITY`` hides the key. CUDA's mathematical functions are there
    (``expf, tanhf, fminf, min, abs``...); a constant like ``0.5`` makes float32 arithmetic slow,
    ``0.5f`` does not.

    ``name[index]`` reads an array by its flat index in C order (one that is not contiguous is
    copied), floats in the type of ``score``. An index outside the array reads the nearest
    element, and its gradient goes there: nothing is ever read or written outside.

    An expression that does not compile is a `CompileError` that shows its line; what is more than
    one expression (statements, comments), or a name that is none, is a ValueError; all before
    anything is written. With ``CUPYFLASH_DEBUG=1`` in the environment the first call with an
    expression compares `backward` with finite differences, and raises ValueError if they differ.

    `cupyflash.score_mods` has some ready.
    """

    forward: str
    backward: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    numpy_forward: Callable[..., Any] | None = field(default=None, kw_only=True)
    numpy_backward: Callable[..., Any] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            expression = getattr(self, name)
            if not isinstance(expression, str) and not (name == "backward" and expression is None):
                raise TypeError(f"{name} must be a CUDA expression (str), got {expression!r}")
        for name in ("numpy_forward", "numpy_backward"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be callable, got {function!r}")
        named = isinstance(self.params, Mapping) and all(isinstance(n, str) for n in self.params)
        if not named:
            raise TypeError(f"params must map names (str) to arrays, got {self.params!r:.80}")

    def __repr__(self) -> str:
        given = [repr(self.forward)] + ([] if self.backward is None else [repr(self.backward)])
        if self.params:
            arrays = ", ".join(f"{name}: {_form(x)}" for name, x in self.params.items())
            given.append(f"params={{{arrays}}}")
        for name in ("numpy_forward", "numpy_backward"):
            function = getattr(self, name)
            if function is not None:
                given.append(f"{name}={getattr(function, '__qualname__', function)}")
        return f"ScoreMod({', '.join(given)})"


def _form(x: Any) -> str:
    return describe(x) if hasattr(x, "shape") and hasattr(x, "dtype") else type(x).__name__
