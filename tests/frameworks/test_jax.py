"""`cupyflash.jax` against the dense reference: eagerly and compiled, values and gradients."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import _dispatch
from tests.frameworks.conftest import ON_GPU
from tests.reference import attention
from tests.tolerance import assert_result

pytest.importorskip("jax", reason="JAX is not installed")

import jax
import jax.experimental
import jax.numpy as jnp
from jax.test_util import check_grads

from cupyflash.jax import flash_attention

B, SQ, SK, H, HK, D, DV = 2, 21, 33, 4, 2, 16, 8

# Older versions have it elsewhere.
enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64


@pytest.fixture(autouse=True, params=["cpu", pytest.param("cuda", marks=ON_GPU)])
def device(request: Any) -> Any:
    try:
        found = jax.devices(request.param)[0]
    except RuntimeError:
        pytest.skip("this JAX has no GPU")
    with jax.default_device(found):
        yield found


@pytest.fixture(params=["eager", "jit"])
def mode(request: Any) -> Any:
    """How a function is run."""
    return jax.jit if request.param == "jit" else lambda function: function


def draw(rng: Any, *shape: int, dtype: Any = np.float32) -> Any:
    return rng.standard_normal(shape).astype(dtype)


def inputs(rng: Any, dtype: Any = np.float32) -> list[Any]:
    shapes = (B, SQ, H, D), (B, SK, HK, D), (B, SK, HK, DV)
    return [draw(rng, *shape, dtype=dtype) for shape in shapes]


def options_of(case: str, rng: Any) -> dict[str, Any]:
    return {
        "plain": lambda: {},
        "causal": lambda: {"causal": True},
        "top-left window": lambda: {"causal": "top-left", "window": (9, None)},
        "scale and softcap": lambda: {"softmax_scale": 0.4, "softcap": 2.0},
        "alibi and sinks": lambda: {"alibi_slopes": abs(draw(rng, H)), "sinks": draw(rng, H)},
        "mask": lambda: {"mask": rng.random((B, 1, SQ, SK)) < 0.7},
        "bias": lambda: {"bias": draw(rng, H, SQ, SK)},
    }[case]()


CASES = [
    "plain",
    "causal",
    "top-left window",
    "scale and softcap",
    "alibi and sinks",
    "mask",
    "bias",
]


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(rng, mode, case):
    arrays, options = inputs(rng), options_of(case, rng)
    dout, dlse = draw(rng, B, SQ, H, DV), draw(rng, B, H, SQ)
    traced = {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
    static = {name: x for name, x in options.items() if name not in traced}

    def attend(q: Any, k: Any, v: Any, traced: Any) -> Any:
        return flash_attention(q, k, v, **static, **traced, return_lse=True)

    def loss(*arguments: Any) -> Any:
        out, lse = attend(*arguments)
        return (out * dout).sum() + (lse * dlse).sum()

    given = [*map(jnp.asarray, arrays), {name: jnp.asarray(x) for name, x in traced.items()}]
    try:
        out, lse = mode(attend)(*given)
    except (cupyflash.UnsupportedError, jax.errors.JaxRuntimeError) as error:
        if jax.default_backend() == "cpu" or "UnsupportedError" not in repr(error):
            raise
        pytest.skip("not on this GPU engine")
    grads = mode(jax.grad(loss, argnums=(0, 1, 2, 3), allow_int=True))(*given)
    right, naive = (
        attention(*arrays, **options, dout=dout, dlse=dlse, dtype=dtype)
        for dtype in (np.float64, np.float32)
    )
    assert_result("out", np.asarray(out), right, naive)
    assert_result("lse", np.asarray(lse), right, naive)
    found = dict(zip(("dq", "dk", "dv"), grads[:3], strict=True))
    found |= {f"d{name}": grads[3][name] for name in ("bias", "sinks") if name in traced}
    for name, grad in found.items():
        assert_result(name, np.asarray(grad), right, naive)
    if "alibi_slopes" in traced:
        assert not np.asarray(grads[3]["alibi_slopes"]).any()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision(rng, mode, dtype):
    arrays = inputs(rng, dtype)
    dout = draw(rng, B, SQ, H, DV, dtype=dtype)
    _, backward = jax.vjp(mode(flash_attention), *map(jnp.asarray, arrays))
    out = mode(flash_attention)(*map(jnp.asarray, arrays))
    grads = backward(jnp.asarray(dout))
    right, naive = (attention(*arrays, dout=dout, dtype=kind) for kind in (np.float64, dtype))
    assert_result("out", np.asarray(out), right, naive)
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        assert_result(name, np.asarray(grad), right, naive)


def test_double_precision_by_finite_differences(rng, mode):
    with enable_x64(True):
        arrays = [jnp.asarray(x, "float64") for x in inputs(rng)]
        attend = partial(flash_attention, causal=True, return_lse=True)
        assert attend(*arrays)[1].dtype == "float64"
        # The quotients are off by up to some 3e-7, more where the third derivative is large.
        check_grads(mode(attend), arrays, order=1, modes=["rev"], rtol=1e-5, atol=1e-5)


def test_layouts_and_no_batch(rng, mode):
    q, k, v = map(jnp.asarray, inputs(rng))
    out, lse = mode(partial(flash_attention, return_lse=True))(q, k, v)
    attend = mode(partial(flash_attention, layout="bhsd", return_lse=True))
    heads_first, same_lse = attend(*(x.swapaxes(1, 2) for x in (q, k, v)))
    np.testing.assert_array_equal(heads_first.swapaxes(1, 2), out)
    np.testing.assert_array_equal(same_lse, lse)
    one, one_lse = mode(partial(flash_attention, return_lse=True))(q[1], k[1], v[1])
    np.testing.assert_allclose(one, out[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(one_lse, lse[1], rtol=1e-5)


def test_inputs_are_not_copied(rng, monkeypatch):
    seen = []
    forward = _dispatch.forward

    def spy(call: Any, **options: Any) -> Any:
        seen.extend(call.arrays)
        return forward(call, **options)

    monkeypatch.setattr(_dispatch, "forward", spy)
    arrays = [jnp.asarray(x) for x in inputs(rng)]
    jax.grad(lambda *given: flash_attention(*given).sum())(*arrays)

    def address(x: Any) -> int:
        return x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr

    assert [address(x) for x in seen] == [x.unsafe_buffer_pointer() for x in arrays]


def test_results_stay_on_the_inputs_device(rng, mode, device):
    q, k, v = (jax.device_put(x, device) for x in inputs(rng))
    assert mode(flash_attention)(q, k, v).devices() == {device}
    assert mode(jax.grad(lambda q: flash_attention(q, k, v).sum()))(q).devices() == {device}


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_reaches_the_backward(rng, mode, monkeypatch, deterministic):
    seen = []
    backward = cupyflash.flash_attention_backward

    def spy(dout: Any, saved: Any, **options: Any) -> Any:
        seen.append(options["deterministic"])
        return backward(dout, saved, **options)

    monkeypatch.setattr(cupyflash, "flash_attention_backward", spy)
    q, k, v = map(jnp.asarray, inputs(rng))
    attend = partial(flash_attention, deterministic=deterministic)
    jax.block_until_ready(mode(jax.grad(lambda q: attend(q, k, v).sum()))(q))
    assert seen == [deterministic]


# --- dropout ------------------------------------------------------------------------------------


def dropped(rng: Any, mode: Any, seed: Any) -> Any:
    q, k, v = map(jnp.asarray, inputs(rng))
    try:
        return mode(lambda seed: flash_attention(q, k, v, dropout_p=0.4, seed=seed))(seed)
    except (cupyflash.UnsupportedError, jax.errors.JaxRuntimeError) as error:
        if jax.default_backend() == "cpu" or "UnsupportedError" not in repr(error):
            raise
        pytest.skip("not on this GPU engine")


def test_dropout_is_the_cores(mode):
    repeat = secrets.randbits(32)
    seed = jnp.uint32(secrets.randbits(32))
    got = dropped(np.random.default_rng(repeat), mode, seed)
    arrays = inputs(np.random.default_rng(repeat))
    want = cupyflash.flash_attention(*arrays, dropout_p=0.4, seed=int(seed))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    other = dropped(np.random.default_rng(repeat), mode, seed + jnp.uint32(1))
    assert np.any(np.asarray(other) != np.asarray(got))


@pytest.mark.parametrize("kind", [int, np.uint64, lambda seed: np.array(seed, np.uint64), "jax"])
def test_wide_seed(rng, kind):
    arrays = inputs(rng)
    seed = 2**63 + 2**32 * 5 + 7
    given = map(jnp.asarray, arrays)
    try:
        if kind == "jax":
            with enable_x64(True):
                got = flash_attention(*given, dropout_p=0.4, seed=jnp.uint64(seed))
        else:
            got = flash_attention(*given, dropout_p=0.4, seed=kind(seed))
    except cupyflash.UnsupportedError:
        pytest.skip("not on this GPU engine")
    want = cupyflash.flash_attention(*arrays, dropout_p=0.4, seed=seed)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_dropout_needs_a_sound_seed(rng):
    q, k, v = map(jnp.asarray, inputs(rng))
    with pytest.raises(ValueError, match="needs a seed"):
        flash_attention(q, k, v, dropout_p=0.1)
    with pytest.raises(TypeError, match="integer scalar array"):
        flash_attention(q, k, v, dropout_p=0.1, seed=q)
    with pytest.raises(ValueError, match="seed must be in"):
        flash_attention(q, k, v, dropout_p=0.1, seed=-1)


# --- inside JAX's transformations ---------------------------------------------------------------


def test_vmap_is_a_loop(rng, mode):
    q, k, v = map(jnp.asarray, inputs(rng))
    many = jnp.stack([q, 2 * q, -q])
    attend = mode(jax.vmap(lambda q: flash_attention(q, k, v, causal=True)))
    for got, one in zip(attend(many), many, strict=True):
        want = flash_attention(one, k, v, causal=True)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_scan_and_checkpoint(rng):
    q, k, v = map(jnp.asarray, inputs(rng))
    v = jnp.concatenate([v, v], axis=-1)  # dv = d, so that out can be the next q

    def unrolled(q: Any) -> Any:
        for _ in range(3):
            q = flash_attention(q, k, v)
        return (q**2).sum()

    @jax.jit
    def scanned(q: Any) -> Any:
        step = jax.checkpoint(lambda q, _: (flash_attention(q, k, v), None))
        return (jax.lax.scan(step, q, length=3)[0] ** 2).sum()

    got, want = (jax.value_and_grad(function)(q) for function in (scanned, unrolled))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-4, atol=1e-5)


def test_compiled_calls_do_not_hang_on_what_is_under_way(rng):
    """XLA's own work before and after a callback, on arrays of several megabytes."""
    x = jnp.asarray(draw(rng, 1, 512, 2, 64))
    weight = jnp.asarray(draw(rng, 64, 64))

    @jax.jit
    def step(x: Any) -> Any:
        x = jnp.tanh(x @ weight)
        return jnp.tanh(flash_attention(x, x, x, causal=True) @ weight)

    for _ in range(10):
        x = step(x)
    assert np.isfinite(np.asarray(x)).all()


def test_second_derivatives_and_forward_mode_say_no(rng):
    q, k, v = map(jnp.asarray, inputs(rng))

    def loss(q: Any) -> Any:
        return (flash_attention(q, k, v) ** 2).sum()

    with pytest.raises(ValueError, match="do not support JVP"):
        jax.grad(lambda q: jax.grad(loss)(q).sum())(q)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss, (q,), (q,))


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda q, k, v: {"k": k[:, :, :1], "v": v}, ValueError, "expected"),
        (lambda q, k, v: {"v": v.astype(jnp.float16)}, TypeError, "one dtype"),
        (lambda q, k, v: {"q": q.astype(jnp.int32)}, TypeError, "int32"),
        (lambda q, k, v: {"layout": "sbhd"}, ValueError, "layout"),
        (lambda q, k, v: {"softcap": -1.0}, ValueError, "softcap"),
        (lambda q, k, v: {"window": [-1, 0]}, ValueError, "window"),
        (lambda q, k, v: {"mask": jnp.ones((3, 1, 1, 1), bool)}, ValueError, "mask"),
        (lambda q, k, v: {"bias": jnp.ones((SK,), jnp.int32)}, TypeError, "bias"),
    ],
)
def test_errors_are_the_cores_also_while_tracing(rng, mode, change, error, message):
    q, k, v = map(jnp.asarray, inputs(rng))
    wrong = {"q": q, "k": k, "v": v} | change(q, k, v)
    arrays = {name: x for name, x in wrong.items() if isinstance(x, jax.Array)}
    static = {name: x for name, x in wrong.items() if name not in arrays}
    with pytest.raises(error, match=message):
        mode(lambda arrays: flash_attention(**arrays, **static))(arrays)


TRACED = {
    "softmax_scale": lambda x: {"softmax_scale": x},
    "softcap": lambda x: {"softcap": x},
    "window": lambda x: {"window": [x, None]},
    "causal": lambda x: {"causal": x > 0},
    "dropout_p": lambda x: {"dropout_p": x},
    "deterministic": lambda x: {"deterministic": x > 0},
    "return_lse": lambda x: {"return_lse": x > 0},
}


@pytest.mark.parametrize("option", TRACED)
def test_a_traced_option_is_named(rng, option):
    q, k, v = map(jnp.asarray, inputs(rng))
    cure = "softmax_scale=1" if option == "softmax_scale" else "static_argnames"
    with pytest.raises(TypeError, match=f"^{option} .* when the function is traced.*{cure}"):
        jax.jit(lambda x: flash_attention(q, k, v, **TRACED[option](x)))(0.1)


def test_a_learned_temperature_as_its_error_says(rng):
    q, k, v = map(jnp.asarray, inputs(rng))

    def loss(scale: Any) -> Any:
        return (flash_attention(scale * q, k, v, softmax_scale=1) ** 2).sum()

    with pytest.raises(TypeError, match="softmax_scale=1"):
        jax.grad(lambda scale: flash_attention(q, k, v, softmax_scale=scale).sum())(0.1)
    value, gradient = jax.jit(jax.value_and_grad(loss))(0.1)
    assert np.isfinite(value) and gradient
    np.testing.assert_allclose(
        flash_attention(0.1 * q, k, v, softmax_scale=1),
        flash_attention(q, k, v, softmax_scale=0.1),
        rtol=1e-4,
        atol=1e-5,
    )


def test_an_engine_that_cannot_serve(rng):
    q, k, v = (jax.device_put(x, jax.devices("cpu")[0]) for x in inputs(rng))
    with pytest.raises(cupyflash.UnsupportedError, match="mma"):
        flash_attention(q, k, v, engine="mma")
    with pytest.raises(jax.errors.JaxRuntimeError, match="mma"):
        jax.block_until_ready(jax.jit(partial(flash_attention, engine="mma"))(q, k, v))
