"""What is timed: one shape of attention, its operations, and the grid of the papers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from cupyflash._validate import MAX_HEAD_DIM

__all__ = [
    "DIRECTIONS",
    "HEAD_DIMS",
    "MASKS",
    "SEQLENS",
    "Workload",
    "grid",
    "of_shapes",
    "parse_head_dim",
    "parse_positive",
    "parse_shape",
]

DIRECTIONS = ("forward", "backward")
MASKS = ("full", "causal")
HEAD_DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
_HIDDEN = 2048  # num_heads * head_dim
_TOKENS = 16384  # batch * seqlen
_MOST_SCORES = 2**32  # 16 GiB of float32: dense attention needs about three times that

Shape = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Workload:
    """One call of attention; causal is aligned bottom-right.

    Parameters
    ----------
    batch, seqlen_q, seqlen_k, num_heads, num_heads_kv, head_dim : int
        Query is ``(batch, seqlen_q, num_heads, head_dim)``.
    causal : bool
    dtype : str
        "float16", "bfloat16", "float32", or "float8_e4m3fn" (forward only).
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    causal: bool
    dtype: str

    @property
    def is_float8(self) -> bool:
        """Whether inputs are e4m3, without factors, and out is bfloat16."""
        return self.dtype == "float8_e4m3fn"

    @property
    def itemsize(self) -> int:
        """Return the bytes of an element."""
        return {"float8_e4m3fn": 1, "float32": 4}.get(self.dtype, 2)

    @property
    def name(self) -> str:
        """Return ``b x s x h x d``, with heads of keys where they are fewer, and the mask."""
        seqlen = str(self.seqlen_q)
        if self.seqlen_k != self.seqlen_q:
            seqlen += f"/{self.seqlen_k}"
        heads = str(self.num_heads)
        if self.num_heads_kv != self.num_heads:
            heads += f"/{self.num_heads_kv}"
        return f"{self.batch} x {seqlen} x {heads} x {self.head_dim} {self.mask}"

    @property
    def mask(self) -> str:
        """Return one of `MASKS`."""
        return MASKS[self.causal]

    @property
    def scores(self) -> int:
        """Return how many scores dense attention keeps."""
        return self.batch * self.num_heads * self.seqlen_q * self.seqlen_k

    @property
    def dense_fits(self) -> bool:
        """Whether peers that keep all scores, and know no grouped heads, take part."""
        equal_heads = self.num_heads == self.num_heads_kv
        return equal_heads and self.scores <= _MOST_SCORES and not self.is_float8

    @property
    def has_corner(self) -> bool:
        """Whether it matters to which corner the causal mask is aligned."""
        return self.causal and self.seqlen_q != self.seqlen_k

    def flops(self, direction: str) -> float:
        """Return the operations of one call, counted as in the FlashAttention papers.

        Two products of 2 d operations a score forward, five backward; causal counts what the mask
        leaves, the diagonal as half: half of all scores where the lengths are equal.
        """
        scores: float = self.scores
        if self.causal:
            shorter = min(self.seqlen_q, self.seqlen_k)
            scores = self.batch * self.num_heads * shorter * (self.seqlen_k - shorter / 2)
        return 4 * self.head_dim * scores * {"forward": 1.0, "backward": 2.5}[direction]


def grid(head_dims: Sequence[int], seqlens: Sequence[int], dtype: str) -> list[Workload]:
    """Return 16384 tokens of hidden size 2048 in every length, full and causal."""
    shapes = [
        (max(1, _TOKENS // seqlen), seqlen, heads, head_dim, heads)
        for head_dim, seqlen in product(head_dims, seqlens)
        for heads in [max(1, _HIDDEN // head_dim)]
    ]
    return sorted(of_shapes(shapes, dtype), key=lambda each: (each.head_dim, each.causal))


def of_shapes(shapes: Sequence[Shape], dtype: str) -> Iterator[Workload]:
    """Yield each ``(b, s, h, d, hk)`` full and causal."""
    for (batch, seqlen, heads, head_dim, heads_kv), causal in product(shapes, (False, True)):
        yield Workload(batch, seqlen, seqlen, heads, heads_kv, head_dim, causal, dtype)


def parse_shape(text: str) -> Shape:
    """Read ``b,s,h,d`` or ``b,s,h,d,hk``.

    Raises
    ------
    argparse.ArgumentTypeError
        Says what is wrong with which number.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (4, 5):
        raise argparse.ArgumentTypeError(f"{text!r} must be b,s,h,d or b,s,h,d,hk: whole numbers")
    batch, seqlen, heads, head_dim = numbers[:4]
    heads_kv = numbers[-1] if len(numbers) == 5 else heads
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: every number must be at least 1")
    if head_dim > MAX_HEAD_DIM:
        raise argparse.ArgumentTypeError(
            f"{text!r}: d must be at most {MAX_HEAD_DIM}, got {head_dim}"
        )
    if heads % heads_kv:
        raise argparse.ArgumentTypeError(
            f"{text!r}: h = {heads} must be a multiple of hk = {heads_kv}"
        )
    return batch, seqlen, heads, head_dim, heads_kv


def parse_head_dim(text: str) -> int:
    """Read a head_dim that our engines know.

    Raises
    ------
    argparse.ArgumentTypeError
        It is none.
    """
    head_dim = parse_positive(text)
    if head_dim > MAX_HEAD_DIM:
        raise argparse.ArgumentTypeError(f"d must be at most {MAX_HEAD_DIM}, got {head_dim}")
    return head_dim


def parse_positive(text: str) -> int:
    """Read a whole number of at least 1.

    Raises
    ------
    argparse.ArgumentTypeError
        It is none.
    """
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1")
    return number
