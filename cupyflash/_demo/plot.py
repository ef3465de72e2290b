"""Plots of the examples, where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["new_figure", "save_figure"]


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of so many inches; None, and say so, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: pip install matplotlib")
        return None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write the figure to a file, and say where."""
    figure.savefig(path, dpi=150)
    print(f"plot: {path}")
