"""Which engine serves a problem, and where its functions are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from cupyflash._arrays import Place
from cupyflash._cuda.device import describe, require_cupy
from cupyflash._problem import Operands, Problem
from cupyflash.errors import EngineNeedsDeviceError, NoDeviceError, UnsupportedError
from cupyflash.tiling import Tiling


def select(
    problem: Problem,
    place: Place,
    named: str | None,
    operands: Operands | None = None,
) -> str:
    """Return the name of the engine that serves `problem` at `place`.

    Parameters
    ----------
    operands : Operands, optional
        The arrays of the call, where they are known: not every engine reads all strides.

    Raises
    ------
    UnsupportedError
        The named engine cannot (says what it lacks), or no engine can.
    """
    if place.device_id is None:
        if named in (None, "numpy"):
            return "numpy"
        raise _gpu_engine_for_host(named)
    if named == "numpy":
        raise UnsupportedError(
            f"engine='numpy' serves host arrays, and this call is for the {place}; "
            "use cupy.asnumpy, or engine=None"
        )
    from cupyflash._cuda.engines import PLANNERS, lacks, yields

    reasons = []
    for engine in PLANNERS if named is None else (named,):
        if named is None and yields(engine, problem):
            continue
        missing = lacks(engine, problem, describe(place.device_id), operands)
        if not missing:
            return engine
        reasons.append(f"engine={engine!r} lacks {', '.join(missing)}")
    raise UnsupportedError(
        f"{'; '.join(reasons)}. GPU engines in this version: {', '.join(PLANNERS)}; "
        "host arrays (NumPy) support every feature"
    )


def select_backward(problem: Problem, place: Place, named: str | None) -> str:
    """Return the name of the engine that differentiates what `select` has served.

    Raises
    ------
    UnsupportedError
        As there.
    """
    engine = select(problem, place, named)
    if engine == "numpy":
        return engine
    from cupyflash._cuda.engines import backward_engine

    return backward_engine(engine, problem)


def _gpu_engine_for_host(named: str | None) -> UnsupportedError:
    message = (
        f"engine={named!r} runs on a GPU and these arrays are NumPy's; "
        "move them with cupy.asarray, or use engine=None"
    )
    try:
        require_cupy()
    except NoDeviceError:
        return EngineNeedsDeviceError(message)
    return UnsupportedError(message)


def choose_tiling(
    problem: Problem,
    place: Place,
    named: str | None,
    tiling: Tiling | None,
    operands: Operands | None = None,
) -> Tiling:
    """Return the tiling with which `problem` would run at `place`; see `select`."""
    engine = select(problem, place, named, operands=operands)
    if place.device_id is None:
        from cupyflash._numpy.tiles import default_tiling

        return replace(tiling or default_tiling(problem), origin="given" if tiling else "table")
    from cupyflash._cuda import tuned
    from cupyflash._cuda.engines import PLANNERS

    device = describe(place.device_id)
    tile = tiling or tuned.find(engine, "forward", problem, device)
    planned: Tiling = PLANNERS[engine].plan_forward(problem, device, tile).tiling
    origin = "given" if tiling else "tuned" if tile else "table"
    return replace(planned, origin=origin)


def forward(engine: str) -> Callable[..., None]:
    """The forward of an engine: see `cupyflash._numpy.forward`."""
    if engine == "numpy":
        from cupyflash._numpy.forward import forward as numpy_forward

        return numpy_forward
    from cupyflash._cuda.forward import forward as cuda_forward

    return partial(cuda_forward, engine)


def backward(engine: str) -> Callable[..., None]:
    """The backward of an engine: see `cupyflash._numpy.backward`."""
    if engine == "numpy":
        from cupyflash._numpy.backward import backward as numpy_backward

        return numpy_backward
    from cupyflash._cuda.backward import backward as cuda_backward

    return partial(cuda_backward, engine)
