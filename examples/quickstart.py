"""Forward, backward, the softmax statistics, and a gradient check by finite differences.

python examples/quickstart.py [--device cpu|gpu]
"""

import argparse
import sys

import numpy as np

import cupyflash


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    xp = array_module(parser.parse_args().device)

    # Arrays are (batch, seqlen, num_heads, head_dim). Two key-value heads serve four query heads.
    rng = np.random.default_rng(0)
    q = xp.asarray(rng.standard_normal((2, 100, 4, 64)))
    k = xp.asarray(rng.standard_normal((2, 150, 2, 64)))
    v = xp.asarray(rng.standard_normal((2, 150, 2, 64)))
    dout = xp.asarray(rng.standard_normal((2, 100, 4, 64)))

    # The output alone, in half precision.
    half = [array.astype("float16") for array in (q, k, v)]
    out = cupyflash.flash_attention(*half, causal=True)
    print(f"out       {out.shape} {out.dtype}")

    # The output and what the backward needs. The two statistics a row, its largest score m and
    # l = sum exp(score - m), are all that is stored of the (100, 150) scores.
    out, saved = cupyflash.flash_attention_forward(q, k, v, causal=True)
    print(
        f"row_max   {saved.row_max.shape}, the first row's m = {float(saved.row_max[0, 0, 0]):.4f}"
    )
    print(
        f"row_sum   {saved.row_sum.shape}, the first row's l = {float(saved.row_sum[0, 0, 0]):.4f}"
    )
    # Causal attention is aligned at the last key: query 0 of 100 sees the first 51 of 150 keys.
    scores = (q[0, 0, 0] * k[0, :51, 0]).sum(axis=-1) / 64**0.5
    lse = float(xp.log(xp.exp(scores).sum()))
    print(f"lse       {float(saved.lse[0, 0, 0]):.6f}, computed by hand {lse:.6f}")

    grads = cupyflash.flash_attention_backward(dout, saved)
    print(f"dq dk dv  {grads.dq.shape} {grads.dk.shape} {grads.dv.shape}")

    # Move each input a little along a random direction: the loss sum(out * dout) must change by
    # the gradient's product with that direction.
    def loss(**inputs) -> float:
        return float((cupyflash.flash_attention(**inputs, causal=True) * dout).sum())

    inputs = {"q": q, "k": k, "v": v}
    for name, grad in (("q", grads.dq), ("k", grads.dk), ("v", grads.dv)):
        direction = xp.asarray(rng.standard_normal(grad.shape))
        up = loss(**inputs | {name: inputs[name] + 1e-5 * direction})
        down = loss(**inputs | {name: inputs[name] - 1e-5 * direction})
        measured = (up - down) / 2e-5
        expected = float((grad * direction).sum())
        print(f"d loss/d{name} {expected:+.6f}, by finite differences {measured:+.6f}")
        assert abs(measured - expected) <= 1e-6 * max(1.0, abs(expected))


def array_module(device: str):
    """NumPy, or CuPy: cupyflash follows the arrays that it is given."""
    if device == "cpu":
        return np
    try:
        import cupy
    except ImportError:
        sys.exit("--device gpu needs CuPy: pip install 'cupyflash[cuda13]'")
    if not cupy.cuda.is_available():
        sys.exit("--device gpu: CuPy finds no usable GPU; --device cpu runs the same in NumPy")
    return cupy


if __name__ == "__main__":
    main()
