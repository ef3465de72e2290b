"""Whose arrays are taken, in what memory, without a copy; and what ``out=`` may be."""

from __future__ import annotations

import importlib.util

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash._arrays import as_array
from tests.cases import DTYPES, Shape
from tests.harness import assert_bits, call, check, draw, require, same_bits
from tests.memory import Guarded, fill_nan, poisoned, to_engine, to_host

# --- strides ------------------------------------------------------------------------------------


def _reversed(axis):
    def view(x):
        return np.flip(np.flip(x, axis).copy(), axis)

    return view


def _broadcast(axis):
    def view(x):
        return np.broadcast_to(x.take([0], axis), x.shape)

    return view


def _gaps(step, before=1, after=1):
    """A view with NaN between its elements (step 2) or around each of its rows."""

    def view(x):
        wide = fill_nan(np.empty((*x.shape[:-1], before + step * x.shape[-1] + after), x.dtype))
        view = wide[..., before : before + step * x.shape[-1] : step]
        view[...] = x
        return view

    return view


VIEWS = {
    "reversed sequence": _reversed(-3),
    "reversed heads": _reversed(-2),
    "reversed width": _reversed(-1),
    "broadcast batch": _broadcast(0),
    "broadcast sequence": _broadcast(-3),
    "broadcast heads": _broadcast(-2),
    "broadcast width": _broadcast(-1),
    "gaps in rows": _gaps(2),
    "gaps between rows": _gaps(1),
    "one gap": _gaps(1, 0, 1),
    "fortran": np.asfortranarray,
    "heads first": lambda x: np.ascontiguousarray(x.swapaxes(-2, -3)).swapaxes(-2, -3),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_any_strides(engine, rng, view, dtype):
    arguments = draw(rng, Shape(seqlen_k=70), dtype, ["causal", "gqa", "dlse"])
    strided = arguments | {name: view(arguments[name]) for name in ("q", "k", "v", "dout", "dlse")}
    dense = {n: np.array(x, order="C") if isinstance(x, np.ndarray) else x
             for n, x in strided.items()}  # fmt: skip
    assert any(strided[name].strides != dense[name].strides for name in ("q", "k", "v", "dout"))
    one = call(engine, deterministic=True, **strided)
    names = ("out", "row_max", "row_sum", "dq", "dk", "dv")
    if engine != "numpy":
        assert_bits(engine, {name: getattr(one, name) for name in names}, **dense)
        return
    other = call(engine, deterministic=True, **dense)
    for name in names:  # BLAS has different kernels for different strides
        got, same = (getattr(each, name).astype(np.float64) for each in (one, other))
        np.testing.assert_allclose(got, same, rtol=2**-6, atol=2**-6, err_msg=name)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_any_strides_of_the_other_arguments(engine, rng, view):
    arguments = draw(rng, Shape(), "float32", ["alibi", "sinks"])
    arguments["bias"] = view(rng.normal(size=(2, 4, 37, 53)).astype(np.float32))
    arguments["mask"] = np.lib.stride_tricks.as_strided(
        np.repeat(rng.random(60) < 0.5, 2)[1:], (2, 1, 1, 53), (6, 0, 0, 2)
    )
    arguments["sinks"] = np.repeat(arguments["sinks"], 2)[::-2]
    check(engine, **arguments)


def test_views_into_one_packed_array(engine, rng):
    packed = rng.normal(size=(2, 41, 3, 4, 24)).astype(np.float16)
    dout = rng.normal(size=(2, 41, 4, 24)).astype(np.float16)
    q, k, v = (packed[:, :, n] for n in range(3))
    check(engine, q=q, k=k, v=v, dout=dout, causal=True)


def test_unaligned_host_memory(rng):
    arguments = draw(rng, Shape(), "float32")
    right = call("numpy", **arguments)
    for name in ("q", "k", "v", "dout"):
        memory = np.zeros(arguments[name].nbytes + 1, np.uint8)
        moved = np.ndarray(arguments[name].shape, np.float32, memory, offset=1)
        moved[...] = arguments[name]
        assert not moved.flags.aligned
        arguments[name] = moved
    moved = call("numpy", **arguments)
    assert same_bits(right.out, moved.out) and same_bits(right.dk, moved.dk)


def test_read_only_inputs(rng):
    arguments = draw(rng, Shape(), "float32", ["bias", "mask"])
    before = {n: x.copy() for n, x in arguments.items() if isinstance(x, np.ndarray)}
    for name in before:
        arguments[name].flags.writeable = False
    call("numpy", **arguments)
    assert all(same_bits(before[name], arguments[name]) for name in before)


# --- out= ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", Guarded.KINDS)
def test_out_may_have_any_strides(engine, rng, kind, dtype):
    layout = rng.choice(["bshd", "bhsd"])
    arguments = draw(rng, Shape(), dtype, ["causal", "gqa"], layout)
    dout = arguments.pop("dout")
    plain = call(engine, dout=dout, deterministic=True, **arguments)
    q, k, v = (to_engine(engine, arguments.pop(name)) for name in "qkv")
    guarded = Guarded(engine, plain.out.shape, plain.out.dtype, kind, rng)
    with poisoned(engine):
        out = cupyflash.flash_attention(q, k, v, out=guarded.view, engine=engine, **arguments)
    assert out is guarded.view and same_bits(to_host(out), plain.out)
    guarded.assert_rest_unchanged()

    guarded = Guarded(engine, plain.out.shape, plain.out.dtype, kind, rng)
    out, saved = cupyflash.flash_attention_forward(
        q, k, v, out=guarded.view, engine=engine, **arguments
    )
    assert out is guarded.view and saved.out is out
    guarded.assert_rest_unchanged()
    grads = cupyflash.flash_attention_backward(to_engine(engine, dout), saved, deterministic=True)
    assert same_bits(to_host(grads.dq), plain.dq) and same_bits(to_host(grads.dk), plain.dk)


@pytest.mark.parametrize("kind", Guarded.KINDS)
def test_out_of_varlen(engine, rng, kind):
    arguments = draw(rng, Shape(), "float32", ["varlen"])
    del arguments["dout"]
    plain = call(engine, **arguments)
    q, k, v = (to_engine(engine, arguments[name]) for name in "qkv")
    cu_seqlens = (to_engine(engine, cu) for cu in arguments["cu_seqlens"])
    guarded = Guarded(engine, plain.out.shape, plain.out.dtype, kind, rng)
    out = cupyflash.flash_attention_varlen(q, k, v, *cu_seqlens, out=guarded.view, engine=engine)
    assert out is guarded.view and same_bits(to_host(out), plain.out)
    guarded.assert_rest_unchanged()


def test_out_beside_an_input_is_no_overlap(engine, rng):
    arguments = draw(rng, Shape(seqlen_q=53), "float32")
    plain = call(engine, **arguments)
    both = np.zeros((2, 53, 4, 2, 24), np.float32)  # q and out interleaved, no byte in common
    both[..., 0, :] = arguments["q"]
    both = to_engine(engine, both)
    k, v = (to_engine(engine, arguments[name]) for name in "kv")
    out = both[..., 1, :]
    assert cupyflash.flash_attention(both[..., 0, :], k, v, out=out, engine=engine) is out
    assert same_bits(to_host(out), plain.out)
    assert same_bits(to_host(both[..., 0, :]).copy(), arguments["q"])


# --- foreign arrays -----------------------------------------------------------------------------


class Exported:
    """Nothing but the DLPack protocol."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


class CudaInterface:
    """Nothing but ``__cuda_array_interface__``."""

    def __init__(self, shape, typestr="<f4", pointer=4096):
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": typestr, "data": (pointer, False), "version": 3,
        }  # fmt: skip


class Tagged(np.ndarray):
    """A subclass; results are plain arrays."""


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dlpack_objects_are_taken_without_a_copy(engine, rng, dtype):
    arguments = draw(rng, Shape(), dtype, ["causal"])
    right = call(engine, deterministic=True, **arguments)
    arrays = [to_engine(engine, arguments[name]) for name in ("q", "k", "v", "dout")]
    q, k, v, dout = map(Exported, arrays)
    out, saved = cupyflash.flash_attention_forward(q, k, v, causal=True, engine=engine)
    grads = cupyflash.flash_attention_backward(dout, saved, deterministic=True)
    assert same_bits(to_host(out), right.out) and same_bits(to_host(grads.dq), right.dq)
    if engine == "numpy":
        assert type(out) is np.ndarray and np.shares_memory(saved.q, arrays[0])
    else:
        assert saved.q.data.ptr == arrays[0].data.ptr


def test_dlpack_operands(engine, rng):
    require(engine, "bias", "sinks", "alibi")
    arguments = draw(rng, Shape(), "float32", ["bias", "sinks", "alibi"])
    right = call(engine, **arguments)
    names = ("bias", "sinks", "alibi_slopes")
    options = {name: Exported(to_engine(engine, arguments[name])) for name in names}
    q, k, v, dout = (to_engine(engine, arguments[name]) for name in ("q", "k", "v", "dout"))
    out, saved = cupyflash.flash_attention_forward(q, k, v, engine=engine, **options)
    grads = cupyflash.flash_attention_backward(dout, saved, deterministic=True)
    assert same_bits(to_host(out), right.out) and grads.dbias.shape == arguments["bias"].shape


def test_subclasses_and_memory_maps(rng, tmp_path):
    arguments = draw(rng, Shape(), "float32")
    right = call("numpy", **arguments)
    arguments["q"].tofile(tmp_path / "q")
    q = np.memmap(tmp_path / "q", np.float32, "r", shape=arguments["q"].shape)
    k, v = (arguments[name].view(Tagged) for name in "kv")
    out = cupyflash.flash_attention(q, k, v)
    assert type(out) is np.ndarray and same_bits(out, right.out)


@pytest.mark.parametrize("bad", [[[1.0]], None, 3.0, "q", object()], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "bias", "sinks", "alibi_slopes"])
def test_what_is_no_array_is_a_type_error(engine, rng, name, bad):
    if bad is None and name not in "qkv":
        return
    arguments = {n: to_engine(engine, rng.normal(size=(1, 5, 2, 8))) for n in "qkv"}
    with pytest.raises(TypeError, match=rf"\b{name}\b"):
        cupyflash.flash_attention(**(arguments | {name: bad}))


def _gpu():
    if importlib.util.find_spec("cupy") is None:
        return False
    import cupy

    return cupy.cuda.is_available()


@pytest.mark.skipif(_gpu(), reason="the pointers are false: only where no GPU could follow them")
class TestWithoutGpu:
    def test_device_arrays(self):
        fake = CudaInterface((1, 5, 2, 8))
        with pytest.raises(cupyflash.NoDeviceError, match="q"):
            cupyflash.flash_attention(fake, fake, fake)

    def test_device_arrays_by_dlpack(self, rng):
        class Device(Exported):
            def __dlpack_device__(self):
                return 2, 0  # kDLCUDA

        fake = Device(rng.normal(size=(1, 5, 2, 8)))
        with pytest.raises(cupyflash.NoDeviceError, match="q"):
            cupyflash.flash_attention(fake, fake, fake)

    @pytest.mark.parametrize("name", ["k", "v", "mask", "bias", "sinks", "alibi_slopes"])
    def test_mixed_host_and_device(self, rng, name):
        arguments = {n: rng.normal(size=(1, 5, 2, 8)).astype(np.float32) for n in "qkv"}
        arguments[name] = CudaInterface((1, 5, 2, 8), "|b1" if name == "mask" else "<f4")
        # Mixed is a TypeError, and no GPU a NoDeviceError: both are true here.
        with pytest.raises((TypeError, cupyflash.NoDeviceError), match=name):
            cupyflash.flash_attention(**arguments)

    @pytest.mark.parametrize("engine", ["simt", "mma", "wgmma"])
    def test_gpu_engine_for_host_arrays(self, rng, engine):
        q = rng.normal(size=(1, 5, 2, 8))
        with pytest.raises(cupyflash.UnsupportedError, match=engine):
            cupyflash.flash_attention(q, q, q, engine=engine)


def addresses(*arrays):
    return [x.ctypes.data for x in arrays]


def test_jax_arrays(rng):
    jax = pytest.importorskip("jax")
    arguments = draw(rng, Shape(), "float32", ["causal"])
    right = call("numpy", **arguments)
    q, k, v, dout = (jax.numpy.asarray(arguments[name]) for name in ("q", "k", "v", "dout"))
    out, saved = cupyflash.flash_attention_forward(q, k, v, causal=True)
    shared = [x.unsafe_buffer_pointer() for x in (q, k, v)]
    assert addresses(saved.q, saved.k, saved.v) == shared
    grads = cupyflash.flash_attention_backward(dout, saved)
    assert type(out) is np.ndarray and same_bits(out, right.out) and same_bits(grads.dq, right.dq)
    half = q.astype("bfloat16")
    out, saved = cupyflash.flash_attention_forward(half, half, half)
    assert out.dtype == ml_dtypes.bfloat16
    assert addresses(saved.q) == [half.unsafe_buffer_pointer()]


def test_torch_tensors(rng):
    torch = pytest.importorskip("torch")
    arguments = draw(rng, Shape(), "float32", ["causal"])
    right = call("numpy", **arguments)
    q, k, v, dout = (torch.from_numpy(arguments[name]) for name in ("q", "k", "v", "dout"))
    out, saved = cupyflash.flash_attention_forward(q, k, v, causal=True)
    assert addresses(saved.q, saved.k, saved.v) == [x.data_ptr() for x in (q, k, v)]
    assert torch.from_dlpack(out).data_ptr() == out.ctypes.data
    grads = cupyflash.flash_attention_backward(dout, saved)
    assert type(out) is np.ndarray and same_bits(out, right.out) and same_bits(grads.dq, right.dq)
    half = q.bfloat16()
    out, saved = cupyflash.flash_attention_forward(half, half, half)
    assert out.dtype == ml_dtypes.bfloat16 and addresses(saved.q) == [half.data_ptr()]
    back = torch.from_numpy(out.view("int16")).view(torch.bfloat16)  # as docs/moving.md says
    assert back.data_ptr() == out.ctypes.data


def test_tensorflow_tensors(rng):
    tensorflow = pytest.importorskip("tensorflow")
    arguments = draw(rng, Shape(), "float32", ["causal"])
    right = call("numpy", **arguments)
    q, k, v, dout = (tensorflow.constant(arguments[name]) for name in ("q", "k", "v", "dout"))
    out, saved = cupyflash.flash_attention_forward(q, k, v, causal=True)
    assert addresses(saved.q, saved.k, saved.v) == addresses(*map(np.from_dlpack, (q, k, v)))
    grads = cupyflash.flash_attention_backward(dout, saved)
    assert type(out) is np.ndarray and same_bits(out, right.out) and same_bits(grads.dq, right.dq)


@pytest.mark.parametrize("name", ["q", "k", "bias"])
def test_device_arrays_between_addresses_are_refused(name):
    """A kernel that read one, CuPy's own too, would leave no CUDA context to go on with."""
    device = pytest.importorskip("tests.strict_device")  # imports CuPy
    arrays = {"q": (1, 3, 2, 4), "k": (1, 5, 2, 4), "v": (1, 5, 2, 4), "bias": (3, 5)}
    arrays = {n: np.zeros(shape, np.float32) for n, shape in arrays.items()}
    size = arrays[name].nbytes
    shifted = np.zeros(size + 1, np.uint8)[1:].view(np.float32).reshape(arrays[name].shape)
    packed = np.zeros(arrays[name].shape, [("x", np.float32), ("y", np.uint8)])["x"]
    for odd in (shifted, packed):
        with device.strict_device():
            given = {n: device.to_device(x) for n, x in (arrays | {name: odd}).items()}
            with pytest.raises(ValueError, match=rf"^{name} has elements at addresses"):
                cupyflash.flash_attention(**given)
        cupyflash.flash_attention(**(arrays | {name: odd}))  # NumPy reads them
    one = packed[tuple(slice(1) for _ in packed.shape)]  # its strides are never taken
    with device.strict_device():
        as_array(device.to_device(one), name)
