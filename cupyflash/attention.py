"""The public functions: exact attention and its gradients."""

from __future__ import annotations

from typing import Any

from cupyflash import _dispatch, _engines, _options, _recipe, _validate
from cupyflash._arrays import HOST, Place, as_array
from cupyflash._options import Options
from cupyflash.state import Gradients, SavedState
from cupyflash.tiling import Tiling

__all__ = [
    "choose_tiling",
    "flash_attention",
    "flash_attention_backward",
    "flash_attention_forward",
]

Array = Any


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    mask: Any = None,
    block_mask: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    score_mod: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    layout: str = "bshd",
    engine: str | None = None,
    tiling: Tiling | None = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    out_dtype: Any = None,
    out: Any = None,
) -> Array:
    """Exact softmax attention, ``softmax(softmax_scale * q k^T) v``, in O(sq + sk) memory.

    Parameters
    ----------
    q : array, shape ``(b, sq, h, d)``
        Queries: float16, bfloat16 (``ml_dtypes.bfloat16``), float32 or float64; d from 1 to 256.
        FP8 (``ml_dtypes.float8_e4m3fn``; on a GPU uint8 holds its bits) without a backward.
        NumPy, CuPy, or any object with ``__dlpack__`` or ``__cuda_array_interface__``; any
        strides. Without the batch axis (3-D) the results have none either.
    k : array, shape ``(b, sk, hk, d)``
        Keys, of q's dtype and place; ``h`` must be a multiple of ``hk`` (grouped heads).
    v : array, shape ``(b, sk, hk, dv)``
        Values; dv from 1 to 256.
    causal : bool or "bottom-right" or "top-left", default False
        True (= "bottom-right"): query i sees keys ``j <= i + sk - sq``; "top-left": ``j <= i``.
    window : (left, right), optional
        Query i sees ``i + sk - sq - left <= j <= i + sk - sq + right`` (with "top-left" the
        ``sk - sq`` is dropped); both sides inclusive, None = open.
    softmax_scale : float, default ``1 / sqrt(d)``
        Any finite number.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``; None or 0 = off.
    mask : bool array broadcastable to ``(b, h, sq, sk)``, optional
        True = takes part. Never expanded in memory.
    block_mask : BlockMask, optional
        Hidden blocks are neither read nor computed; ANDed with `mask`.
    bias : float array broadcastable to ``(b, h, sq, sk)``, optional
        Added to the scores after softcap; has a gradient; -inf hides a key.
    alibi_slopes : float32 array ``(h,)`` or ``(b, h)``, optional
        Adds ``-slope * |i + sk - sq - j|`` (with "top-left" ``-slope * |i - j|``).
    sinks : float32 array ``(h,)``, optional
        One extra logit a head in the softmax's denominator; has a gradient.
    score_mod : ScoreMod, optional
        A user-written change of the scores, applied before masking.
    dropout_p : float in [0, 1), default 0
        Drops probabilities after normalisation and rescales the rest by ``1 / (1 - dropout_p)``.
        What is dropped depends only on (seed, batch, head, i, j).
    seed : int in [0, 2**64), optional
        Seed of the dropout; None draws one (see ``SavedState.seed``).
    layout : "bshd" or "bhsd", default "bshd"
        "bhsd": q, k, v and out are ``(b, heads, s, width)``. mask and bias do not change.
    engine : None, "numpy", "simt", "mma" or "wgmma", default None
        None = the best that supports the call.
    tiling : Tiling, optional
        Tile sizes; None = chosen (see `choose_tiling`), from what ``python -m cupyflash bench
        --tune`` remembers for calls like this one, else from the engine's table. The backward
        uses them too where they fit its kernels.
    q_descale, k_descale, v_descale : float or float32 array ``(b, hk)`` or ``(1, hk)``, default 1
        FP8 only: what q, k and v stand for is their numbers times these positive factors, see
        `quantize_fp8`; q's are those of the key-value head of its group.
    out_dtype : dtype, default q's; for FP8 bfloat16
        Of the output: FP8 calls may ask for bfloat16, float16 or float32.
    out : array of out's shape and dtype, optional
        Where to write the result, any strides; returned itself.

    Returns
    -------
    array, shape ``(b, sq, h, dv)``
        NumPy for host input, CuPy for device input, of q's dtype (FP8: `out_dtype`); rows that see
        no key are 0.

    Raises
    ------
    TypeError
        Something is no array or has the wrong dtype, or the arrays live in different places.
    ValueError
        Shapes, ranges, or an `out` that is read-only or overlaps an input.
    UnsupportedError
        No engine (or not the named one) can serve the call.
    CompileError
        A kernel did not compile.
    NoDeviceError
        The arrays are on a GPU that cannot be used.

    Notes
    -----
    The algorithm is FlashAttention-2 (Dao 2023, arXiv 2307.08691, Algorithm 1): key tiles stream
    past each query tile, and the output is rescaled whenever the row maximum grows. Accumulation
    and softmax are in float32 (float64 for float64).

    Examples
    --------
    >>> import numpy as np, cupyflash
    >>> q = k = v = np.random.default_rng(0).standard_normal((1, 128, 4, 64), dtype=np.float32)
    >>> cupyflash.flash_attention(q, k, v, causal=True).shape
    (1, 128, 4, 64)
    """
    options = Options(
        causal, window, softmax_scale, softcap, mask, block_mask, bias, alibi_slopes, sinks,
        score_mod, dropout_p, seed, layout, engine, tiling, q_descale, k_descale, v_descale,
        out_dtype,
    )  # fmt: skip
    recipe = _recipe.find(q, k, v, options) if out is None else None
    if recipe is not None:
        return recipe(q, k, v, options)
    call = _validate.bind(q, k, v, options, out=out)
    result, _, _ = _dispatch.forward(call, save=False)
    if out is None and call.place != HOST:
        _recipe.remember(call, (q, k, v), options, result)
    return result


def flash_attention_forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    mask: Any = None,
    block_mask: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    score_mod: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    layout: str = "bshd",
    engine: str | None = None,
    tiling: Tiling | None = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    out_dtype: Any = None,
    out: Any = None,
) -> tuple[Array, SavedState]:
    """Like `flash_attention`, and keep what the backward needs.

    Parameters and errors are those of `flash_attention`.

    Returns
    -------
    out : array, shape ``(b, sq, h, dv)``
    saved : SavedState
        The inputs, the output and the statistics ``row_max`` (m) and ``row_sum`` (l), float32
        (float64 for float64), ``(b, h, sq)``; ``saved.lse`` is ``m + log(l)``.
    """
    options = Options(
        causal, window, softmax_scale, softcap, mask, block_mask, bias, alibi_slopes, sinks,
        score_mod, dropout_p, seed, layout, engine, tiling, q_descale, k_descale, v_descale,
        out_dtype,
    )  # fmt: skip
    return _dispatch.saved_forward(_validate.bind(q, k, v, options, out=out))


def flash_attention_backward(
    dout: Any, saved: SavedState, *, dlse: Any = None, deterministic: bool = False
) -> Gradients:
    """Gradients of a saved forward call, from recomputed tiles.

    Parameters
    ----------
    dout : array of ``saved.out``'s shape and dtype
        Gradient of the loss by the output.
    saved : SavedState
        From `flash_attention_forward` or `flash_attention_varlen_forward`; it can be used again.
    dlse : array of ``saved.lse``'s shape and dtype, optional
        Gradient of the loss by ``saved.lse``.
    deterministic : bool, default False
        True: everything is bit-equal from run to run. Without it dq, dbias, dsinks, dscore_params,
        and dk, dv of grouped heads may differ by rounding.

    Returns
    -------
    Gradients
        Named tuple ``(dq, dk, dv, dbias, dsinks, dscore_params)``; parts that do not apply are
        None. dq, dk, dv have their inputs' shapes and dtypes, dbias the bias's, dsinks is float32.

    Raises
    ------
    TypeError, ValueError
        `dout` or `dlse` does not fit the saved call, or `saved` is something else.
    UnsupportedError
        The saved call was an FP8 one.

    Notes
    -----
    FlashAttention-2 (arXiv 2307.08691), Algorithm 2, with ``D = rowsum(dout * out) - dlse``.
    """
    if not isinstance(saved, SavedState):
        raise TypeError(
            f"saved must be the SavedState of a forward call, got {type(saved).__name__}; "
            "flash_attention_forward returns (out, saved)"
        )
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic must be True or False, got {deterministic!r}")
    place, out = saved._call.place, as_array(saved.out, "out")
    _validate.require_backward(saved._call)
    grad_out = _validate.bind_gradient(dout, "dout", out, place, out.dtype)
    grad_lse = None
    if dlse is not None:
        grad_lse = _validate.bind_gradient(dlse, "dlse", saved.row_max, place, saved.row_max.dtype)
    return _dispatch.backward(saved, grad_out, grad_lse, deterministic)


def choose_tiling(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    mask: Any = None,
    block_mask: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    score_mod: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    layout: str = "bshd",
    engine: str | None = None,
    tiling: Tiling | None = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    out_dtype: Any = None,
    out: Any = None,
    device: int | None = None,
) -> Tiling:
    """Return the `Tiling` that `flash_attention` would use for these arguments.

    Its ``origin`` says who chose it, and so does printing it.

    Parameters are those of `flash_attention`, and:

    device : int, optional
        Plan for this CUDA device, also when the arrays are NumPy's; None = where the arrays are.

    Raises
    ------
    NoDeviceError
        `device` names a GPU and there is none.
    """
    options = Options(
        causal, window, softmax_scale, softcap, mask, block_mask, bias, alibi_slopes, sinks,
        score_mod, dropout_p, seed, layout, engine, tiling, q_descale, k_descale, v_descale,
        out_dtype,
    )  # fmt: skip
    call = _validate.bind(q, k, v, options, out=out)
    place = call.place if device is None else Place(_options.integer(device, "device"))
    return _engines.choose_tiling(
        call.problem, place, call.options.engine, call.options.tiling, call.operands
    )
