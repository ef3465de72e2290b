"""Your own change of the scores: ready ones, one written here, and the gradients of their arrays.

python examples/score_mods.py [--device cpu|gpu]
"""

import argparse

import numpy as np

import cupyflash
from cupyflash import score_mods
from cupyflash._demo.device import describe, select, to_host

BATCH, TOKENS, HEADS, HEAD_DIM = 2, 96, 4, 32


def wave(gains, period: float) -> cupyflash.ScoreMod:
    """``score + gains[h] * cos((i - j) * 2 pi / period)``: heads may like every third token."""
    step = 2 * np.pi / period

    # On a GPU this text is compiled into the kernels. Arrays are read by flat index; without a
    # second text the derivative is taken from the first.
    expression = f"score + gains[h] * cosf(float(i - j) * {step:.8f}f)"

    # On the host these run, a tile at a time: i is a column of indices, j a row.
    def forward(score, b, h, i, j, gains):
        return score + gains[h] * np.cos((i - j) * step)

    def backward(score, b, h, i, j, gains):
        # d new / d score, and for each array: which element was read, d new / d element.
        return 1.0, {"gains": ((h,), np.cos((i - j) * step))}

    return cupyflash.ScoreMod(
        expression, params={"gains": gains}, numpy_forward=forward, numpy_backward=backward
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default: a GPU if there is one")
    xp = select(parser.parse_args().device)
    print(describe(xp))

    rng = np.random.default_rng(0)
    shape = (BATCH, TOKENS, HEADS, HEAD_DIM)
    q, k, v, dout = (xp.asarray(rng.standard_normal(shape, "float32")) for _ in range(4))

    def new(*shape: int):
        return xp.asarray(rng.standard_normal(shape, "float32"))

    # Two documents a sequence, of 40 and 56 tokens.
    ids = xp.asarray(np.repeat([[0, 1]] * BATCH, [40, 56], axis=1).astype("int32"))
    mods = {
        "soft_cap": score_mods.soft_cap(5.0),
        "distance_decay": score_mods.distance_decay(abs(new(HEADS))),
        "documents": score_mods.documents(ids),
        "relative_position_bias": score_mods.relative_position_bias(new(32, HEADS)),
        "wave (your own)": wave(new(HEADS), period=3.0),
    }
    for name, mod in mods.items():
        out, saved = cupyflash.flash_attention_forward(q, k, v, score_mod=mod)
        grads = cupyflash.flash_attention_backward(dout, saved)
        assert out.shape == dout.shape
        print(f"\n{name}\n  {mod.forward}")
        for parameter, gradient in grads.dscore_params.items():
            check_gradient(xp, rng, mod, parameter, gradient, (q, k, v), dout)


def check_gradient(xp, rng, mod, name, gradient, inputs, dout) -> None:
    """Move an array along a random direction: the loss sum(out * dout) must follow its gradient."""
    direction = xp.asarray(rng.standard_normal(gradient.shape))
    q, k, v, dout = (array.astype("float64") for array in (*inputs, dout))

    def loss(step: float) -> float:
        moved = mod.params[name].astype("float64") + step * direction
        other = cupyflash.ScoreMod(
            mod.forward,
            mod.backward,
            dict(mod.params) | {name: moved},
            numpy_forward=mod.numpy_forward,
            numpy_backward=mod.numpy_backward,
        )
        return float((cupyflash.flash_attention(q, k, v, score_mod=other) * dout).sum())

    measured = (loss(1e-4) - loss(-1e-4)) / 2e-4
    expected = float((to_host(gradient).astype("float64") * to_host(direction)).sum())
    print(f"  d loss/d{name} {expected:+.5f}, by finite differences {measured:+.5f}")
    assert abs(measured - expected) <= 1e-3 * max(1.0, abs(expected))


if __name__ == "__main__":
    main()
