"""What approximate attention saves, and what it costs: error and time beside exact attention.

    python examples/exact_vs_approximate.py [--length 2048] [--device cpu|gpu] [--plot out.png]

Linformer, Performer, Reformer and a local window, each at several budgets, on tokens of a few
topics whose attention is neither flat nor a copy. Nothing here is trained to its approximation, as
a model may be; the question is what happens to one that has learnt exact attention.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

import cupyflash
from cupyflash._demo.arguments import HEAD_DIM, PLOT, POSITIVE
from cupyflash._demo.dense import dense_forward
from cupyflash._demo.device import describe, select, timed
from cupyflash._demo.plot import new_figure, save_figure
from cupyflash._demo.progress import progress

BUDGETS = (32, 128, 512)


class Run(NamedTuple):
    """One method at one budget: its error relative to the exact output, and its time."""

    method: str
    budget: int | None
    error: float
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=POSITIVE, default=2048, help="tokens")
    parser.add_argument("--heads", type=POSITIVE, default=4)
    parser.add_argument("--head-dim", type=HEAD_DIM, default=64)
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default: a GPU if there is one")
    parser.add_argument("--plot", type=PLOT, default="exact_vs_approximate.png")
    arguments = parser.parse_args()
    xp = select(arguments.device)
    shape = (arguments.length, arguments.heads, arguments.head_dim)
    inputs = make_inputs(xp, *shape)
    exact = cupyflash.flash_attention(*(array.astype("float64") for array in inputs))
    budgets = [budget for budget in BUDGETS if budget < arguments.length]
    tasks = [("dense", None, dense), ("cupyflash", None, cupyflash.flash_attention)]
    tasks += [(name, budget, partial(method, budget=budget))
              for name, method in METHODS.items() for budget in budgets]  # fmt: skip
    runs = []
    for name, budget, method in progress(tasks, "methods"):
        method(*inputs)
        out, seconds = min(
            (timed(xp, partial(method, *inputs)) for _ in range(3)), key=lambda t: t[1]
        )
        error = float(xp.sqrt(((out - exact) ** 2).sum() / (exact**2).sum()))
        runs.append(Run(name, budget, error, seconds))

    print(f"{describe(xp)}; {shape[0]} tokens, {shape[1]} heads of {shape[2]}, float32, forward")
    print(f"{'method':12}{'budget':>8}{'error':>10}{'time':>12}")
    for run in runs:
        shown = "" if run.budget is None else run.budget
        print(f"{run.method:12}{shown:>8}{run.error:10.1e}{run.seconds * 1e3:9.1f} ms")
    save_plot(runs, arguments.plot)


def make_inputs(xp, length: int, heads: int, width: int):
    """Queries, keys, values of tokens that come in runs of one topic, of 16 topics."""
    rng = np.random.default_rng(0)
    topics = rng.standard_normal((16, heads, width))
    runs = rng.integers(16, size=length // 16 + 1).repeat(16)[:length]
    query, key, value = (
        0.7 * topics[runs] + rng.standard_normal((length, heads, width)) for _ in range(3)
    )
    return [xp.asarray(array, "float32") for array in (query, key, value)]


def dense(query, key, value):
    return dense_forward(query, key, value)[0]


# --- the approximations: (s, h, d) to (s, h, d) -------------------------------------------------


def local(query, key, value, budget: int):
    """Each query sees `budget` neighbours; exact in what it sees."""
    return cupyflash.flash_attention(query, key, value, window=(budget // 2, budget // 2))


def linformer(query, key, value, budget: int):
    """Keys and values of `budget` rows (Wang et al. 2020), here the means of neighbours."""
    xp, length = module_of(query), len(query)
    group = np.arange(length) * budget // length
    projection = (group == np.arange(budget)[:, None]).astype("float32")
    projection = xp.asarray(projection / projection.sum(axis=1, keepdims=True))
    key, value = (xp.tensordot(projection, x, 1) for x in (key, value))
    return cupyflash.flash_attention(query, key, value)


def performer(query, key, value, budget: int):
    """`budget` positive random features of the softmax kernel (Choromanski et al. 2021)."""
    xp, width = module_of(query), query.shape[-1]
    directions = orthogonal(np.random.default_rng(1), budget, width) * width**0.5
    directions = xp.asarray(directions.T, "float32")

    def features(x, axes):
        x = (x * width**-0.25).swapaxes(0, 1)
        exponent = x @ directions - (x * x).sum(-1, keepdims=True) / 2
        return xp.exp(exponent - exponent.max(axes, keepdims=True)) + np.float32(1e-6)

    query, key = features(query, -1), features(key, (1, 2))
    summed = key.swapaxes(1, 2) @ value.swapaxes(0, 1)
    normaliser = query @ key.sum(axis=1)[:, :, None]
    return (query @ summed / normaliser).swapaxes(0, 1)


def reformer(query, key, value, budget: int):
    """Tokens sorted by a random hash; each sees `budget` neighbours (Kitaev et al. 2020).

    One round of hashing; queries and keys are hashed alike and sorted apart.
    """
    xp, (length, _, width) = module_of(query), query.shape
    buckets = max(2, 2 * (length // budget))
    rotation = xp.asarray(
        np.random.default_rng(1).standard_normal((width, buckets // 2)), "float32"
    )

    def order(x):
        turned = x.swapaxes(0, 1) @ rotation
        bucket = xp.concatenate([turned, -turned], axis=-1).argmax(axis=-1)
        return xp.argsort(bucket * length + xp.arange(length), axis=-1).T[..., None]

    by_query, by_key = order(query), order(key)
    query, key, value = (
        xp.take_along_axis(x, rows, axis=0)
        for x, rows in ((query, by_query), (key, by_key), (value, by_key))
    )
    out = cupyflash.flash_attention(query, key, value, window=(budget // 2, budget // 2))
    return xp.take_along_axis(out, xp.argsort(by_query, axis=0), axis=0)


METHODS = {"local": local, "Linformer": linformer, "Performer": performer, "Reformer": reformer}


def orthogonal(rng, rows: int, width: int) -> np.ndarray:
    """Rows of random orthogonal blocks, each of length 1 but for its own random norm."""
    blocks = [
        np.linalg.qr(rng.standard_normal((width, width)))[0] for _ in range(-(-rows // width))
    ]
    norms = np.linalg.norm(rng.standard_normal((rows, width)), axis=1, keepdims=True) / width**0.5
    return np.concatenate(blocks)[:rows] * norms


def module_of(array):
    if isinstance(array, np.ndarray):
        return np
    import cupy

    return cupy


def save_plot(runs: list[Run], path: Path) -> None:
    figure = new_figure(7, 4.2)
    if figure is None:
        return
    axes = figure.subplots()
    for name in dict.fromkeys(run.method for run in runs):
        own = [run for run in runs if run.method == name]
        times, errors = [r.seconds * 1e3 for r in own], [r.error for r in own]
        axes.loglog(
            times, errors, "o-" if len(own) > 1 else "*", ms=14 if len(own) == 1 else 6, label=name
        )
        for run, x, y in zip(own, times, errors, strict=True):
            if run.budget:
                axes.annotate(
                    run.budget, (x, y), textcoords="offset points", xytext=(5, 4), fontsize=8
                )
    axes.set(
        xlabel="time, ms",
        ylabel="relative error of the output",
        title="Exact and approximate attention",
    )
    axes.legend()
    save_figure(figure, path)


if __name__ == "__main__":
    main()
