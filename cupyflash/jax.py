"""Attention for JAX, differentiable in reverse mode.

Outside `jax.jit` JAX arrays are used where they lie. Inside, XLA calls back to Python; see
`flash_attention` for what that costs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

try:
    import jax
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}: pip install 'cupyflash[jax]'", name=error.name) from error
import jax.numpy as jnp
import numpy as np

import cupyflash
from cupyflash import _dispatch, _options, _validate
from cupyflash._arrays import HOST, as_array, place_of
from cupyflash._cuda.device import require_cupy
from cupyflash._options import Options
from cupyflash.state import SavedState

__all__ = ["flash_attention"]

Array = Any
Arrays = dict[str, Any]  # by argument name; what was not given is left out


class _Static(NamedTuple):
    """What is no array, and so fixed when a function is compiled."""

    causal: Any
    window: Any
    softmax_scale: Any
    softcap: Any
    dropout_p: Any
    layout: Any
    engine: Any
    deterministic: bool


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
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    layout: str = "bshd",
    engine: str | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """`cupyflash.flash_attention` of JAX arrays, with gradients of q, k, v, bias and sinks.

    Parameters
    ----------
    q : array, shape ``(b, sq, h, d)``
        float16, bfloat16, float32, or with ``jax_enable_x64`` float64.
    k : array, shape ``(b, sk, hk, d)``
    v : array, shape ``(b, sk, hk, dv)``
    seed : int or integer scalar array, optional
        Of the dropout, which needs one, as JAX's functions have no state: draw a new one for each
        step, e.g. ``jax.random.bits(key)``. An array may change without compiling again.
    deterministic : bool, default False
        As for `cupyflash.flash_attention_backward`.
    return_lse : bool, default False
        Also return lse, ``(b, h, sq)``, float32 (float64 for float64), which has a gradient too.

    The other parameters are those of `cupyflash.flash_attention`. No gradient flows to
    ``alibi_slopes``.

    Returns
    -------
    array, shape ``(b, sq, h, dv)``
        With ``return_lse=True``: ``(out, lse)``.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As `cupyflash.flash_attention`, also inside `jax.jit`, while the function is traced;
        dropout without a seed; an option other than the arrays and the seed that is traced.
    jax.errors.JaxRuntimeError
        Inside `jax.jit`, what shows only when the function runs: an engine that cannot serve the
        call, a kernel that does not compile.

    Notes
    -----
    Outside `jax.jit` (also under `jax.grad`) the inputs are shared by DLPack, not copied, and so
    are the results on a GPU; on the host a result is copied once, as JAX wants memory at multiples
    of 64 bytes.

    Inside `jax.jit` (and `jax.vmap`, `jax.lax.scan`, ...) the call becomes a `jax.pure_callback`:
    every call waits for what comes before it, holds the interpreter's lock, cannot be fused, and
    on a GPU takes its inputs to the host and back to the device, its results likewise: about
    ``2 * bytes / (PCIe or NVLink bandwidth)``. Use it inside `jax.jit` where attention itself takes
    longer than that, which grows with the square of the length. XLA may call it more often than
    the program says, or not at all where nobody uses the result. `jax.vmap` runs the entries one
    after the other: give them a batch axis instead. The arrays must lie on one device.

    For the backward JAX keeps q, k, v, out and two numbers a row and head. Second derivatives and
    forward mode are not there; JAX says so.
    """
    if isinstance(window, list):
        window = tuple(window)  # hashable, as all that is fixed at compilation
    static = _Static(
        causal, window, softmax_scale, softcap, dropout_p, layout, engine, deterministic
    )
    _require_untraced(return_lse=return_lse, **static._asdict())
    given = {
        "q": q, "k": k, "v": v, "mask": mask, "bias": bias, "sinks": sinks,
        "alibi_slopes": alibi_slopes, "seed": _seed_words(seed, dropout_p),
    }  # fmt: skip
    arrays = {
        name: x if isinstance(x, jax.Array) else jnp.asarray(x)  # asarray may copy a traced one
        for name, x in given.items()
        if x is not None
    }
    out, lse = _attend(static, arrays)
    return (out, lse) if return_lse else out


def _require_untraced(**options: Any) -> None:
    """XLA calls back with arrays: what else a call needs must be known when JAX traces it."""
    for name, value in options.items():
        if any(isinstance(part, jax.core.Tracer) for part in jax.tree.leaves(value)):
            cure = "name it in static_argnames of jax.jit"
            if name == "softmax_scale":
                cure = "multiply q by it and pass softmax_scale=1"
            raise TypeError(
                f"{name} must be a Python value known when the function is traced, "
                f"got a traced one; {cure}"
            )


def _seed_words(seed: Any, dropout_p: Any) -> Array | None:
    """The seed as two uint32, the lower first: JAX has 64 bits only if asked for."""
    if seed is None:
        if dropout_p:
            raise ValueError(
                f"dropout_p={dropout_p} needs a seed: an int, or an integer array such as "
                "jax.random.bits(key)"
            )
        return None
    if isinstance(seed, np.ndarray) and seed.ndim == 0:
        seed = seed[()]  # JAX would cut it to 32 bits
    if isinstance(seed, (int, np.integer)):
        number = _options.seed(seed, needed=True)
        return np.array([number], "<u8").view("<u4")
    seed = jnp.asarray(seed)
    if seed.shape != () or not jnp.issubdtype(seed.dtype, jnp.integer):
        raise TypeError(
            f"seed must be an int or an integer scalar array, got shape {seed.shape}, "
            f"dtype {seed.dtype}; jax.random.bits(key) makes one of a key"
        )
    high = seed >> 32 if seed.dtype.itemsize == 8 else 0
    return jnp.stack([seed.astype("uint32"), jnp.asarray(high).astype("uint32")])


# --- the rule of differentiation ----------------------------------------------------------------


def _attend_alone(static: _Static, arrays: Arrays) -> tuple[Array, Array]:
    (out, lse), _ = _attend_forward(static, arrays)
    return out, lse


def _attend_forward(static: _Static, arrays: Arrays) -> tuple[Any, Any]:
    forms = partial(_result_forms, static, arrays)
    out, row_max, row_sum = _run(partial(_forward, static), forms, arrays)
    return (out, row_max + jnp.log(row_sum)), (arrays, out, row_max, row_sum)


def _attend_backward(static: _Static, saved: Any, grads: Any) -> tuple[Arrays]:
    arrays = saved[0]
    names = [name for name in ("q", "k", "v", "bias", "sinks") if name in arrays]
    found = _run(
        partial(_backward, static, names),
        lambda: tuple(_form(arrays[name]) for name in names),
        *saved,
        *(_beside(arrays["q"], gradient) for gradient in grads),
    )
    return (dict.fromkeys(arrays) | dict(zip(names, found, strict=True)),)


def _beside(query: Any, gradient: Any) -> Any:
    """Return `gradient` where `query` is: JAX hands on the caller's, which may be NumPy's."""
    if isinstance(gradient, np.ndarray) and not isinstance(query, jax.core.Tracer):
        return jax.device_put(gradient, *query.devices())
    return gradient


_attend = jax.custom_vjp(_attend_alone, nondiff_argnums=(0,))
_attend.defvjp(_attend_forward, _attend_backward)


# --- cupyflash's own calls, on arrays of one place ----------------------------------------------


def _forward(static: _Static, arrays: Arrays) -> tuple[Array, ...]:
    return _dispatch.forward(_bound(static, arrays), save=True)


def _backward(
    static: _Static, names: list[str], arrays: Arrays, out: Array, row_max: Array, row_sum: Array,
    dout: Array, dlse: Array,
) -> tuple[Array, ...]:  # fmt: skip
    call = _bound(static, arrays)
    statistics = as_array(row_max, "row_max"), as_array(row_sum, "row_sum")
    saved = SavedState(*call.arrays, as_array(out, "saved out"), *statistics, call.options, call)
    grads = cupyflash.flash_attention_backward(
        dout, saved, dlse=dlse, deterministic=static.deterministic
    )
    return tuple(getattr(grads, f"d{name}") for name in names)


def _bound(static: _Static, arrays: Arrays) -> _validate.Call:
    """The call after all its checks."""
    options = static._asdict()
    del options["deterministic"]
    options |= {name: arrays.get(name) for name in ("mask", "bias", "alibi_slopes", "sinks")}
    if "seed" in arrays:
        low, high = arrays["seed"].tolist()
        options["seed"] = high << 32 | low
    return _validate.bind(arrays["q"], arrays["k"], arrays["v"], Options(**options))


# --- where a call runs --------------------------------------------------------------------------


def _run(function: Callable[..., Any], forms: Callable[[], Any], *arguments: Any) -> Any:
    """Results of `function`: at once, or by a callback where JAX only traces."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arguments)):
        results = forms()
        host, device = (partial(_by_callback, function, x, results) for x in (False, True))
        return jax.lax.platform_dependent(*arguments, cpu=host, cuda=device)
    results = function(*arguments)
    place = place_of(results[0])
    if place == HOST:
        (device,) = arguments[0]["q"].devices()
        return tuple(jax.device_put(x, device) for x in results)
    with place.current():  # JAX may reuse an input's memory as soon as nobody holds it
        place.namespace.cuda.get_current_stream().synchronize()
    return tuple(map(jax.dlpack.from_dlpack, results))


def _by_callback(function: Callable[..., Any], on_gpu: bool, forms: Any, *arguments: Any) -> Any:
    callback = partial(_called_back, function, on_gpu)
    return jax.pure_callback(callback, forms, *arguments, vmap_method="sequential")


def _called_back(function: Callable[..., Any], on_gpu: bool, *arguments: Any) -> Any:
    """Runs inside XLA, which may hang if JAX computed anything here: only NumPy and CuPy do."""
    arguments = jax.tree.map(np.asarray, arguments)
    if not on_gpu:
        return function(*arguments)
    cupy = require_cupy()
    return tuple(x.get() for x in function(*jax.tree.map(cupy.asarray, arguments)))


def _result_forms(static: _Static, arrays: Arrays) -> tuple[Any, ...]:
    """Shapes and dtypes of `_forward`'s results, after all checks, from shapes and dtypes alone."""
    call = _bound(static, {name: _stand_in(x) for name, x in arrays.items()})
    *lead, rows, columns = arrays["q"].shape[:-1]
    if not call.layout.heads_first:
        rows, columns = columns, rows
    out = (*arrays["q"].shape[:-1], arrays["v"].shape[-1])
    statistics = jax.ShapeDtypeStruct((*lead, rows, columns), call.problem.accumulator_dtype)
    return jax.ShapeDtypeStruct(out, arrays["q"].dtype), statistics, statistics


def _stand_in(x: Array) -> Array:
    """Zeros of x's shape and dtype with dense rows, all in the memory of one row."""
    return np.broadcast_to(np.zeros(x.shape[-1:], x.dtype), x.shape)


def _form(x: Array) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
