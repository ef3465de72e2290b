"""The GPU engines, and what each one serves."""

from __future__ import annotations

from types import ModuleType

from cupyflash._cuda import plan, plan_mma, plan_wgmma
from cupyflash._cuda.device import Device
from cupyflash._problem import Operands, Problem

__all__ = ["PLANNERS", "lacks", "runs_on"]

# Fastest first. Each planner has plan_forward and plan_backward, SUPPORTED_FEATURES,
# SUPPORTED_DTYPES and LEAST_CAPABILITY, and may have LAST_CAPABILITY and unreadable.
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
    missing = sorted(problem.features - planner.SUPPORTED_FEATURES)
    if problem.dtype not in planner.SUPPORTED_DTYPES:
        missing.append(problem.dtype)
    if not runs_on(engine, device):
        major, minor = device.compute_capability
        missing.append(f"compute capability {major}.{minor} ({device.name})")
    unreadable = getattr(planner, "unreadable", None)
    reason = unreadable(problem, operands) if operands is not None and unreadable else None
    return missing if reason is None else [*missing, reason]
