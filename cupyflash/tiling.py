"""`Tiling`: the tile sizes of one call."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Tiling"]


@dataclass(frozen=True)
class Tiling:
    """How a call is cut into tiles.

    Parameters
    ----------
    block_m : int
        Queries of one tile (the paper's B_r).
    block_n : int
        Keys of one tile (the paper's B_c).
    stages : int
        Key tiles in flight between global and shared memory; 1 = no overlap.
    warps : int
        Warps of one thread block; NumPy ignores it.
    origin : str
        Who chose it: "given" by the caller, from the engine's "table", or "tuned" on this GPU.
        Two tilings of the same sizes are equal whatever it says; `choose_tiling` sets it.
    """

    block_m: int
    block_n: int
    stages: int = 1
    warps: int = 4
    origin: str = field(default="given", compare=False, repr=False)

    def __str__(self) -> str:
        """Return the sizes and, where somebody else chose them, who that was."""
        sources = {
            "table": ", from the engine's table",
            "tuned": ", remembered from `python -m cupyflash bench --tune`",
        }
        return f"{self!r}{sources.get(self.origin, '')}"
