"""Code that passed its tests without a GPU, and waits for one."""

from __future__ import annotations

import os

__all__ = ["enabled"]


def enabled() -> bool:
    """Whether ``CUPYFLASH_TRIAL=1`` asks for kernels that have not run on a GPU yet.

    They passed the emulation of tests/emulator and compile for every architecture, which finds
    wrong results, but neither races nor how fast they are. Without it new kernels serve no call,
    but for FP8 in simt, which nothing else computes. Kernels that have run may have been changed
    since: tests/device_record.json is then pending.
    """
    return os.environ.get("CUPYFLASH_TRIAL") == "1"
