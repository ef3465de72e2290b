"""What one attention call asks for: `Problem` (plain values) and `Operands` (arrays)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cupyflash._cuda.score_source import ScoreSource
    from cupyflash.block_mask import BlockMask
    from cupyflash.score_mod import ScoreMod

Array = Any  # numpy.ndarray or cupy.ndarray: the package never mixes them within one call


@dataclass(frozen=True)
class Problem:
    """Shapes and options of one call, without its arrays.

    Causal attention is the window whose right bound is 0; ``diagonal`` says which key lies under
    query 0. Every engine derives what it compiles and what it passes at run time from this value.
    """

    dtype: str  # of q; FP8: "float8_e4m3fn"
    batch: int
    seqlen_q: int  # varlen: total_q, all entries together
    seqlen_k: int  # varlen: total_k
    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    softmax_scale: float  # FP8: times those descales of q and k that the host knows
    window_left: int | None = None
    window_right: int | None = None
    top_left: bool = False
    softcap: float | None = None
    dropout_p: float = 0.0
    varlen: bool = False
    # Which optional operands take part: "mask", "bias", "alibi_slopes", "sinks", "score_mod",
    # "block_mask".
    extras: frozenset[str] = frozenset()
    masks: int = 0  # arrays of `Operands.masks`
    bias_dtype: str | None = None
    bias_shape: tuple[int, ...] = ()  # 4 axes, 1 where it is broadcast
    # Extents of all masks and the block mask together, 1 along axes where they all are broadcast;
    # () without any, and for varlen.
    mask_shape: tuple[int, ...] = ()
    score_mod: ScoreSource | None = None  # on a GPU: what is compiled
    out_dtype: str | None = None  # None: that of q
    kv_dtype: str | None = None  # of k and v; None: that of q
    # FP8: descales of k and v where the host knows them, that of k in softmax_scale already.
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def is_empty(self) -> bool:
        """Whether there are no scores at all."""
        return 0 in (self.batch, self.seqlen_q, self.seqlen_k)

    @property
    def group_size(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_heads_kv

    @property
    def key_dtype(self) -> str:
        return self.kv_dtype or self.dtype

    @property
    def is_float8(self) -> bool:
        """Whether k and v are FP8; q may be 16-bit."""
        return self.key_dtype == "float8_e4m3fn"

    @property
    def is_banded(self) -> bool:
        """Whether it is causal or has a window: which keys a query sees depends on its place."""
        return self.window_left is not None or self.window_right is not None

    @property
    def output_dtype(self) -> str:
        return self.out_dtype or self.dtype

    @property
    def accumulator_dtype(self) -> str:
        """The dtype of scores, sums and statistics: float64 for float64, else float32."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def bias_is_broadcast(self) -> bool:
        """Whether scores share elements of the bias, within an entry or across them."""
        full = (self.batch, self.num_heads, self.seqlen_q, self.seqlen_k)
        return any(n == 1 != whole for n, whole in zip(self.bias_shape, full, strict=False))

    @property
    def bias_is_summed(self) -> bool:
        """Whether gradients of the bias may be sums; varlen and axes of length 1 count as such."""
        return self.varlen or self.bias_is_broadcast or 1 in (self.seqlen_q, self.seqlen_k)

    @property
    def bias_is_summed_in_tiles(self) -> bool:
        """Whether mma sums up the bias's gradient in memory of its own.

        An axis of length 1 is no whole one: kernels take it for a broadcast one, that never ends.
        """
        rows_cols = self.bias_shape[2:]
        whole = rows_cols == (self.seqlen_q, self.seqlen_k) and 1 not in rows_cols
        return whole and self.bias_is_broadcast and not self.varlen

    def grad_bias_dtype(self, engine: str) -> str:
        """The dtype in which an engine writes dbias: what is not summed up there can be rounded."""
        narrow = self.bias_dtype in ("float16", "bfloat16")
        rounds = not self.bias_is_summed or self.bias_is_summed_in_tiles
        if engine == "mma" and narrow and rounds:
            return str(self.bias_dtype)
        return self.accumulator_dtype

    @property
    def causal(self) -> bool:
        return self.window_right == 0

    def diagonal(self, seqlen_q: int, seqlen_k: int) -> int:
        """Key index that windows and ALiBi place under query 0 of a sequence pair."""
        return 0 if self.top_left else seqlen_k - seqlen_q

    @property
    def features(self) -> frozenset[str]:
        """Names of everything beyond plain attention that an engine must know to serve this."""
        names = set(self.extras)
        if self.window_left is not None or self.window_right not in (None, 0):
            names.add("window")
        elif self.causal:
            names.add("causal")
        if self.softcap is not None:
            names.add("softcap")
        if self.dropout_p > 0:
            names.add("dropout")
        if self.varlen:
            names.add("varlen")
        if self.is_float8 and self.output_dtype == "float32":
            names.add("float32_output")
        if self.key_dtype != self.dtype:
            names.add("float8_cache")
        return frozenset(names)


@dataclass(frozen=True, eq=False)
class Operands:
    """The arrays of one call in canonical order, all on one device, none of them expanded.

    query is ``(b, sq, h, d)``, key ``(b, sk, hk, d)``, value ``(b, sk, hk, dv)``; varlen:
    ``(total_q, h, d)``, ``(total_k, hk, d)``, ``(total_k, hk, dv)``. They are views of the
    caller's arrays, whatever the layout. mask and bias are 4-D with size-1 axes where they
    broadcast over ``(b, h, sq, sk)`` (varlen: ``(b, h, max sq, max sk)``).
    """

    query: Array
    key: Array
    value: Array
    cu_seqlens_q: Array | None = None  # int32 (b + 1,)
    cu_seqlens_k: Array | None = None
    cu_seqlens_checked: bool = True  # False: they came on the device, and nobody has looked
    mask: Array | None = None  # bool, True = takes part
    bias: Array | None = None  # any float dtype
    alibi_slopes: Array | None = None  # float32 (1 or b, h)
    sinks: Array | None = None  # float32 (h,)
    block_mask: BlockMask | None = None
    score_mod: ScoreMod | None = None
    # FP8 only: factors float32 (1 or b, hk) beside those in `Problem`.
    query_descale: Array | None = None
    key_descale: Array | None = None
    value_descale: Array | None = None
    seed: Any = 0  # int in [0, 2**64), or a device uint64 array of one element

    @property
    def masks(self) -> tuple[Array | None, Array | None]:
        """The element masks, given ones first: the call's and the block mask's inner one."""
        inner = None if self.block_mask is None else self.block_mask.mask
        return (inner, None) if self.mask is None else (self.mask, inner)

    @property
    def score_arrays(self) -> tuple[Array, ...]:
        """The named arrays of score_mod, in the order of their slots."""
        return () if self.score_mod is None else tuple(self.score_mod.params.values())


@dataclass(frozen=True, eq=False)
class GradientBuffers:
    """Where a backward engine writes; canonical order, uninitialised memory on entry.

    dbias has the 4-D shape of ``Operands.bias`` and the accumulator dtype, dsinks is float32
    ``(h,)``, dscore_params maps the names of floating parameters to arrays of their shapes in the
    accumulator dtype.
    """

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None = None
    dsinks: Array | None = None
    dscore_params: dict[str, Array] | None = None
