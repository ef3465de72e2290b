"""Time and peak memory of attention as the sequence grows, flash against dense.

    python examples/long_sequence.py [--device cpu|gpu] [--lengths 512 1024 ...] [--plot out.png]

Forward and backward of one causal sequence. Memory is measured: tracemalloc on the host, CuPy's
memory pool on the GPU.
"""

import argparse
from functools import partial
from pathlib import Path

import numpy as np

import cupyflash
from cupyflash._demo.arguments import HEAD_DIM, PLOT, POSITIVE
from cupyflash._demo.dense import dense_backward, dense_forward
from cupyflash._demo.device import describe, measure, select
from cupyflash._demo.plot import new_figure, save_figure
from cupyflash._demo.progress import progress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default: a GPU if there is one")
    parser.add_argument("--lengths", type=POSITIVE, nargs="+", help="tokens, the shortest first")
    parser.add_argument("--heads", type=POSITIVE, default=4)
    parser.add_argument("--head-dim", type=HEAD_DIM, default=64)
    parser.add_argument("--plot", type=PLOT, default="long_sequence.png")
    arguments = parser.parse_args()
    xp = select(arguments.device)
    lengths = arguments.lengths or [256, 512, 1024, 2048] + [4096, 8192] * (xp is not np)
    print(f"{describe(xp)}; {arguments.heads} heads of {arguments.head_dim}, float32, causal")

    rng = np.random.default_rng(0)
    rows = []
    for length in progress(lengths, "lengths"):
        shape = (length, arguments.heads, arguments.head_dim)
        inputs = [xp.asarray(rng.standard_normal(shape, "float32")) for _ in range(4)]
        if not rows:  # kernels are compiled and libraries loaded when first needed
            flash(*inputs), dense(*inputs)
        fast, slow = (measure(xp, partial(run, *inputs)) for run in (flash, dense))
        rows.append((length, fast, slow))

    print(f"{'':8}{'time':>24}{'peak memory':>28}")
    print(f"{'tokens':>8}{'flash':>12}{'dense':>12}{'flash':>14}{'dense':>14}{'difference':>12}")
    for length, fast, slow in rows:
        difference = max(
            float(abs(a - b).max()) for a, b in zip(fast.result, slow.result, strict=True)
        )
        print(
            f"{length:8}{fast.seconds * 1e3:9.1f} ms{slow.seconds * 1e3:9.1f} ms"
            f"{fast.peak_bytes / 2**20:10.1f} MiB{slow.peak_bytes / 2**20:10.1f} MiB"
            f"{difference:12.1e}"
        )
    save_plot(rows, arguments.plot)


def flash(query, key, value, grad_out):
    out, saved = cupyflash.flash_attention_forward(query, key, value, causal=True)
    grads = cupyflash.flash_attention_backward(grad_out, saved)
    return out, grads.dq, grads.dk, grads.dv


def dense(query, key, value, grad_out):
    out, weights = dense_forward(query, key, value, causal=True)
    return out, *dense_backward(grad_out, query, key, value, weights)


def save_plot(rows, path: Path) -> None:
    figure = new_figure(9, 3.6)
    if figure is None:
        return
    lengths, fast, slow = zip(*rows, strict=True)
    memory, time = figure.subplots(1, 2)
    for name, runs in (("cupyflash", fast), ("dense", slow)):
        memory.loglog(lengths, [run.peak_bytes / 2**20 for run in runs], "o-", base=2, label=name)
        time.loglog(lengths, [run.seconds * 1e3 for run in runs], "o-", base=2, label=name)
    for axes in (memory, time):
        axes.set_xticks(lengths, map(str, lengths))
        axes.yaxis.set_major_formatter("{x:g}")
    memory.set(title="Peak memory, forward and backward", xlabel="tokens", ylabel="MiB")
    time.set(title="Time, forward and backward", xlabel="tokens", ylabel="ms")
    memory.legend()
    save_figure(figure, path)


if __name__ == "__main__":
    main()
