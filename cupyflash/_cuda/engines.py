"""The GPU engines, and what each one serves."""

from __future__ import annotations

from types import ModuleType

from cupyflash._cuda import plan, plan_mma, plan_wgmma
from cupyflash._cuda.device import Device
from cupyflash._problem import Operands, Problem

__all__ = ["PLANNERS", "backward_engine", "lacks", "runs_on", "yields"]

# Fastest first. Each planner has plan_forward and plan_backward, SUPPORTED_FEATURES,
# SUPPORTED_DTYPES and LEAST_CAPABILITY, and may have LAST_CAPABILITY, unreadable and yields;
# WIDE_FEATURES if FP8 has fewer, BACKWARD_FEATURES if the backward has.
PLANNERS: dict[str, ModuleType] = {"wgmma": plan_wgmma, "mma": plan_mma, "simt": plan}


def runs_on(engine: str, device: Device) -> bool:
    """Whether `device` has the instructions of `engine`."""
    planner, capability = PLANNERS[engine], device.compute_capability
    last = getattr(planner, "LAST_CAPABILITY", capability)
    return bool(planner.LEAST_CAPABILITY <= capability <= last)


def lacks(
    engine: str, problem: Problem, device: Device, operands: Operands | None = None
) -> list[str]:
    """Return what `engine` does not have that `problem` on `device` needs; empty: it serves it.

    Without `operands`, arrays that any engine can read are taken for granted.
    """
    if engine not in PLANNERS:
        return ["an implementation in this version"]
    planner = PLANNERS[engine]
    features = planner.SUPPORTED_FEATURES
    if not problem.is_float8:
        features = getattr(planner, "WIDE_FEATURES", features)
    missing = sorted(problem.features - features)
    if problem.dtype not in planner.SUPPORTED_DTYPES:
        missing.append(problem.dtype)
    if not runs_on(engine, device):
        major, minor = device.compute_capability
        missing.append(f"compute capability {major}.{minor} ({device.name})")
    unreadable = getattr(planner, "unreadable", None)
    reason = unreadable(problem, operands) if operands is not None and unreadable else None
    return missing if reason is None else [*missing, reason]


def yields(engine: str, problem: Problem) -> bool:
    """Whether `engine` serves `problem` more slowly than those after it."""
    slower = getattr(PLANNERS[engine], "yields", None)
    return slower is not None and slower(problem)


def backward_engine(engine: str, problem: Problem) -> str:
    """Return the engine that differentiates what `engine` computes: not wgmma if it lacks that."""
    features = getattr(PLANNERS.get(engine), "BACKWARD_FEATURES", problem.features)
    return engine if problem.features <= features else "mma"
