"""Learn an additive bias by its gradient, in full and along one axis.

    python examples/bias_gradient.py [--device cpu|gpu] [--steps 60]

A teacher attends with a bias that its pupil cannot see. The pupil starts without any, and moves
its own along the gradient until the outputs agree. Nothing of size heads * tokens * tokens is
stored but that bias, and none of it where the bias has fewer axes.
"""

import argparse

import numpy as np

import cupyflash
from cupyflash._demo.arguments import POSITIVE
from cupyflash._demo.device import describe, select, to_host
from cupyflash._demo.progress import progress

TOKENS, HEADS, HEAD_DIM = 48, 2, 16
ENOUGH_STEPS = 40  # to have learnt most of the bias


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default: a GPU if there is one")
    parser.add_argument("--steps", type=POSITIVE, default=60)
    arguments = parser.parse_args()
    xp = select(arguments.device)
    print(f"{describe(xp)}; {TOKENS} tokens, {HEADS} heads, {arguments.steps} steps")
    print(f"{'bias':24}{'loss before':>12}{'after':>10}{'correlation with the teacher':>30}")

    rng = np.random.default_rng(0)
    for shape in ((1, HEADS, TOKENS, TOKENS), (1, HEADS, 1, TOKENS)):
        teacher = xp.asarray(2 * rng.standard_normal(shape, "float32"))
        learnt, losses = learn(xp, rng, teacher, arguments.steps)
        # Softmax does not see what is added to a whole row.
        centred = [to_host(bias - bias.mean(axis=-1, keepdims=True)) for bias in (learnt, teacher)]
        correlation = np.corrcoef(*(bias.ravel() for bias in centred))[0, 1]
        print(f"{shape!s:24}{losses[0]:12.4f}{losses[-1]:10.4f}{correlation:30.3f}")
        assert losses[-1] < 0.2 * losses[0] or arguments.steps < ENOUGH_STEPS


def learn(xp, rng, teacher, steps: int):
    """Return a bias of the teacher's shape, and the losses on the way to it."""
    bias = xp.zeros_like(teacher)
    mean, square, losses = xp.zeros_like(bias), xp.zeros_like(bias), []
    shape = (8, TOKENS, HEADS, HEAD_DIM)
    for step in progress(range(1, steps + 1), "steps"):
        q, k, v = (xp.asarray(rng.standard_normal(shape, "float32")) for _ in range(3))
        target = cupyflash.flash_attention(q, k, v, bias=teacher)
        out, saved = cupyflash.flash_attention_forward(q, k, v, bias=bias)
        losses.append(float(((out - target) ** 2).mean()))
        gradient = cupyflash.flash_attention_backward(out - target, saved).dbias
        # Adam (Kingma and Ba 2015)
        mean += 0.1 * (gradient - mean)
        square += 0.02 * (gradient**2 - square)
        size = xp.sqrt(square / (1 - 0.98**step)) + 1e-8
        bias -= 0.15 * mean / (1 - 0.9**step) / size
    return bias, losses


if __name__ == "__main__":
    main()
