"""Train a small GPT on Romeo and Juliet in Chainer, and again with dense attention.

    python examples/gpt_chainer.py [--device cpu|gpu] [--steps 250] [--plot out.png]

Both trainings start from the same weights and see the same text, so their losses must agree.
Needs Chainer; examples/README.md says how to install it.
"""

import argparse
import sys
import time
from pathlib import Path

try:
    import cupyflash.chainer
except ImportError as error:  # it says how to install Chainer
    sys.exit(str(error))

import chainer  # after cupyflash.chainer, which lets it run beside NumPy 2 and CuPy 14
import chainer.functions as F
import chainer.links as L
import numpy as np

from cupyflash._demo.arguments import PLOT, POSITIVE, whole
from cupyflash._demo.device import describe, select
from cupyflash._demo.plot import new_figure, save_figure
from cupyflash._demo.progress import progress

TEXT = Path(__file__).parent / "data/romeo_and_juliet.txt"


class DenseAttention(chainer.Link):
    """What FlashAttention replaces: all scores of all heads in memory at once."""

    def forward(self, q, k, v, mask=None):
        q, k, v = (F.transpose(x, (0, 2, 1, 3)) for x in (q, k, v))
        scores = F.matmul(q, k, transb=True) / q.shape[-1] ** 0.5
        future = self.xp.tri(q.shape[2], dtype=bool) == 0
        hidden = self.xp.full(scores.shape, -np.inf, scores.dtype)
        scores = F.where(self.xp.broadcast_to(future, scores.shape), hidden, scores)
        return F.transpose(F.matmul(F.softmax(scores, axis=3), v), (0, 2, 1, 3))


class Block(chainer.Chain):
    """Causal attention and two linear layers, each after a normalisation."""

    def __init__(self, width, heads):
        super().__init__()
        with self.init_scope():
            self.norm1, self.norm2 = L.LayerNormalization(width), L.LayerNormalization(width)
            self.attention = cupyflash.chainer.MultiHeadAttention(width, heads, causal=True)
            self.up, self.down = L.Linear(width, 4 * width), L.Linear(4 * width, width)

    def forward(self, x):
        x += self.attention(rows(self.norm1, x))
        hidden = F.relu(self.up(rows(self.norm2, x), n_batch_axes=2))
        return x + self.down(hidden, n_batch_axes=2)


class GPT(chainer.Chain):
    """From letters (B, T) to the logits of the next ones (B, T, vocabulary)."""

    def __init__(self, vocabulary, context, width, heads, layers):
        super().__init__()
        with self.init_scope():
            self.tokens, self.places = L.EmbedID(vocabulary, width), L.EmbedID(context, width)
            self.blocks = chainer.ChainList(*(Block(width, heads) for _ in range(layers)))
            self.norm, self.head = L.LayerNormalization(width), L.Linear(width, vocabulary)

    def forward(self, tokens):
        places = self.places(self.xp.arange(tokens.shape[1], dtype=np.int32))
        x = self.tokens(tokens)
        x += F.broadcast_to(places, x.shape)
        for block in self.blocks:
            x = block(x)
        return self.head(rows(self.norm, x), n_batch_axes=2)


def rows(layer, x):
    """Apply a layer of Chainer's that knows one batch axis to each token."""
    return F.reshape(layer(F.reshape(x, (-1, x.shape[-1]))), x.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default: a GPU if there is one")
    parser.add_argument("--steps", type=POSITIVE, help="default: 250, on a GPU 2000")
    parser.add_argument(
        "--context", type=whole(1, 10_000), default=128, help="characters seen at once"
    )
    parser.add_argument("--batch", type=POSITIVE, default=8)
    parser.add_argument("--plot", type=PLOT, default="gpt_chainer.png")
    arguments = parser.parse_args()
    xp = select(arguments.device)
    device = chainer.get_device("@numpy" if xp is np else "@cupy:0")
    device.use()
    arguments.steps = arguments.steps or (250 if xp is np else 2000)

    text = TEXT.read_text(encoding="utf-8")
    letters = sorted(set(text))
    tokens = np.array([letters.index(letter) for letter in text], np.int32)
    np.random.seed(0)  # noqa: NPY002, Chainer's generator
    gpt = GPT(len(letters), arguments.context, width=64, heads=2, layers=2)
    print(f"{describe(xp)}; {len(text)} characters, {gpt.count_params()} parameters, float32")

    losses = {}
    for name in ("flash", "dense"):
        model = gpt.copy(mode="copy")
        if name == "dense":
            for block in model.blocks:
                block.attention.attention = DenseAttention()
        model.to_device(device)
        start = time.perf_counter()
        losses[name] = train(model, tokens, arguments)
        seconds = time.perf_counter() - start
        curve = ", ".join(f"{loss:.3f}" for loss in losses[name][:: max(1, arguments.steps // 5)])
        print(f"{name}: loss {curve} ... {losses[name][-1]:.4f} in {seconds:.1f} s")
        if name == "flash":
            print("\n" + generate(model, letters, "ROMEO:\n", 120, arguments.context) + "\n")
    difference = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    print(f"largest difference of the two losses at any step: {difference:.1e}")
    save_plot(losses, arguments.plot)


def train(model, tokens, arguments) -> list[float]:
    optimizer = chainer.optimizers.Adam(3e-3).setup(model)
    rng, losses = np.random.default_rng(0), []
    for _ in progress(range(arguments.steps), "training"):
        starts = rng.integers(len(tokens) - arguments.context - 1, size=(arguments.batch, 1))
        batch = model.xp.asarray(tokens[starts + np.arange(arguments.context + 1)])
        logits = model(batch[:, :-1])
        loss = F.softmax_cross_entropy(
            F.reshape(logits, (-1, logits.shape[-1])), batch[:, 1:].ravel()
        )
        model.cleargrads()
        loss.backward()
        optimizer.update()
        losses.append(float(loss.array))
    return losses


def generate(model, letters: list[str], prompt: str, count: int, context: int) -> str:
    """Continue a text, drawing each letter from the model's distribution."""
    tokens, rng = [letters.index(letter) for letter in prompt], np.random.default_rng(1)
    with chainer.no_backprop_mode(), chainer.using_config("train", False):
        for _ in range(count):
            logits = model(model.xp.asarray([tokens[-context:]], np.int32))[0, -1].array
            noise = model.xp.asarray(rng.gumbel(size=len(letters)), np.float32)
            tokens.append(int((2 * logits + noise).argmax()))
    return "".join(letters[token] for token in tokens)


def save_plot(losses: dict[str, list[float]], path: Path) -> None:
    figure = new_figure(6, 4)
    if figure is None:
        return
    axes = figure.subplots()
    for (name, values), style in zip(losses.items(), ("-", "--"), strict=True):
        axes.plot(range(1, len(values) + 1), values, style, label=f"{name} attention")
    axes.set(xlabel="step", ylabel="loss (nats a character)", title="GPT on Romeo and Juliet")
    axes.legend()
    save_figure(figure, path)


if __name__ == "__main__":
    main()
