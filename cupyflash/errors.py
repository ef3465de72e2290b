"""Exceptions that users can catch by name."""

from __future__ import annotations

__all__ = ["CompileError", "EngineNeedsDeviceError", "NoDeviceError", "UnsupportedError"]


class UnsupportedError(NotImplementedError):
    """The request is well formed, but no engine (or not the named one) can serve it."""


class CompileError(RuntimeError):
    """A CUDA kernel did not compile; the message quotes the log and the saved source's path."""


class NoDeviceError(RuntimeError):
    """Device arrays or a GPU engine were asked for, and there is no usable GPU."""


class EngineNeedsDeviceError(UnsupportedError, NoDeviceError):
    """A GPU engine was named for host arrays, and there is no GPU: either name catches it."""
