"""Which engine serves a problem."""

from __future__ import annotations

import importlib
from typing import Any

from cupyflash._arrays import HOST, Place
from cupyflash._cuda.device import require_cupy
from cupyflash._problem import Problem
from cupyflash.errors import NoDeviceError, UnsupportedError
from cupyflash.tiling import Tiling

# Fastest first; each is a module with SUPPORTED_FEATURES.
_GPU_PLANS = {"simt": "cupyflash._cuda.plan"}


class _NoDeviceForEngineError(UnsupportedError, NoDeviceError):
    """A GPU engine was named for host arrays on a machine that has no GPU: both are true."""


def select(problem: Problem, place: Place, named: str | None) -> str:
    """Return the name of the engine that serves `problem` at `place`.

    Raises
    ------
    UnsupportedError
        The named engine cannot (says what it lacks), or no engine can.
    """
    if place == HOST:
        if named in (None, "numpy"):
            return "numpy"
        raise _gpu_engine_for_host(named)
    if named == "numpy":
        raise UnsupportedError(
            f"engine='numpy' serves host arrays, and this call is for the {place}; "
            "use cupy.asnumpy, or engine=None"
        )
    candidates = _GPU_PLANS if named is None else {named: _GPU_PLANS.get(named)}
    reasons = []
    for engine, module in candidates.items():
        missing = _missing(problem, module)
        if not missing:
            return engine
        reasons.append(f"engine={engine!r} lacks {', '.join(missing)}")
    raise UnsupportedError(
        f"{'; '.join(reasons)}. GPU engines in this version: {', '.join(_GPU_PLANS)}; "
        "host arrays (NumPy) support every feature"
    )


def choose_tiling(
    problem: Problem, place: Place, named: str | None, tiling: Tiling | None
) -> Tiling:
    """Return the tiling with which `problem` would run at `place`; errors as in `select`."""
    select(problem, place, named)
    if place == HOST:
        from cupyflash._numpy.tiles import default_tiling

        return tiling or default_tiling(problem)
    from cupyflash._cuda.device import describe
    from cupyflash._cuda.plan import plan_forward

    return plan_forward(problem, describe(place.device_id), tiling).tiling


def _missing(problem: Problem, module: str | None) -> list[str]:
    if module is None:
        return ["an implementation in this version"]
    supported = importlib.import_module(module).SUPPORTED_FEATURES
    return sorted(problem.features - supported)


def _gpu_engine_for_host(named: str | None) -> UnsupportedError:
    message = (
        f"engine={named!r} runs on a GPU and these arrays are NumPy's; "
        "move them with cupy.asarray, or use engine=None"
    )
    return UnsupportedError(message) if _has_device() else _NoDeviceForEngineError(message)


def _has_device() -> bool:
    try:
        require_cupy()
    except NoDeviceError:
        return False
    return True


def implementation(engine: str, pass_name: str) -> Any:
    """The module with ``forward`` or ``backward`` of an engine."""
    package = "_numpy" if engine == "numpy" else "_cuda"
    return importlib.import_module(f"cupyflash.{package}.{pass_name}")
