"""An outside judge: ONNX Runtime's CPU `Attention` operator (opset 23), where it is installed."""

from __future__ import annotations

import numpy as np
import pytest

import cupyflash

ROUNDING = 1e-5  # both sides' float32: some 1e-6 where scores are large

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


def _attention(q, k, v, mask=None, **attributes):
    """Run the operator; arrays are (b, h, s, d), `mask` is bool or added to the scores."""
    inputs = {"q": q, "k": k, "v": v} | ({} if mask is None else {"mask": mask})
    kinds = {n: onnx.helper.np_dtype_to_tensor_dtype(x.dtype) for n, x in inputs.items()}
    node = onnx.helper.make_node("Attention", list(inputs), ["out"], **attributes)
    graph = onnx.helper.make_graph(
        [node],
        "attention",
        [onnx.helper.make_tensor_value_info(n, kinds[n], x.shape) for n, x in inputs.items()],
        [onnx.helper.make_tensor_value_info("out", kinds["q"], list("bhsd"))],
    )
    opsets = [onnx.helper.make_opsetid("", 23)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, inputs)[0]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"causal": "top-left"}, {"is_causal": 1}),  # the operator's causal is aligned top-left
        ({"softmax_scale": 0.3}, {"scale": 0.3}),
        ({"softcap": 1.5}, {"softcap": 1.5}),
        ({"causal": "top-left", "softcap": 2.0, "softmax_scale": 0.4},
         {"is_causal": 1, "softcap": 2.0, "scale": 0.4}),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("heads_kv", [4, 2, 1])
@pytest.mark.parametrize("seqlens", [(33, 33), (20, 47), (47, 20)], ids=str)
def test_options(rng, ours, theirs, heads_kv, seqlens):
    q = rng.normal(size=(2, 4, seqlens[0], 16)).astype(np.float32)
    k, v = (rng.normal(size=(2, heads_kv, seqlens[1], 16)).astype(np.float32) for _ in range(2))
    out = cupyflash.flash_attention(q, k, v, layout="bhsd", **ours)
    np.testing.assert_allclose(out, _attention(q, k, v, **theirs), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("shape", [(2, 4, 20, 47), (1, 1, 20, 47), (2, 1, 20, 47)], ids=str)
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_masks(rng, name, shape):
    q = rng.normal(size=(2, 4, 20, 16)).astype(np.float32)
    k, v = (rng.normal(size=(2, 2, 47, 16)).astype(np.float32) for _ in range(2))
    mask = rng.random(shape) < 0.6
    mask[..., 0] = True
    value = mask if name == "mask" else rng.normal(size=shape).astype(np.float32)
    out = cupyflash.flash_attention(q, k, v, layout="bhsd", **{name: value})
    np.testing.assert_allclose(out, _attention(q, k, v, value), rtol=0, atol=ROUNDING)


def test_values_of_another_width(rng):
    q, k = (rng.normal(size=(2, 4, 20, 16)).astype(np.float32) for _ in range(2))
    v = rng.normal(size=(2, 4, 20, 40)).astype(np.float32)
    out = cupyflash.flash_attention(q, k, v, layout="bhsd")
    np.testing.assert_allclose(out, _attention(q, k, v), rtol=0, atol=ROUNDING)
