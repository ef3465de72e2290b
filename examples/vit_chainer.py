"""Train a vision transformer in Chainer on scikit-learn's 8 x 8 digits, with Chainer's Trainer.

    python examples/vit_chainer.py [--device cpu|gpu] [--epochs 10]

Each image is cut into 16 patches of 2 x 2. Needs Chainer and scikit-learn; examples/README.md says
how to install them.
"""

import argparse
import sys
import time

try:
    import cupyflash.chainer
except ImportError as error:  # it says how to install Chainer
    sys.exit(str(error))

import chainer  # after cupyflash.chainer, which lets it run beside NumPy 2 and CuPy 14
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer.training import StandardUpdater, Trainer, extensions

from cupyflash._demo.arguments import POSITIVE
from cupyflash._demo.device import describe, select

PATCH = 2


class Encoder(chainer.Chain):
    """One layer on (B, C, T), Chainer's own order of axes."""

    def __init__(self, width, heads):
        super().__init__()
        with self.init_scope():
            self.norm1, self.norm2 = L.LayerNormalization(width), L.LayerNormalization(width)
            self.attention = cupyflash.chainer.MultiHeadAttention(width, heads, layout="bct")
            self.up = L.Convolution1D(width, 2 * width, 1)
            self.down = L.Convolution1D(2 * width, width, 1)

    def forward(self, x):
        x += self.attention(normalise(self.norm1, x))
        hidden = F.relu(self.up(normalise(self.norm2, x)))
        return x + self.down(hidden)


class VisionTransformer(chainer.Chain):
    """From images (B, 1, 8, 8) to the logits of the digits (B, 10)."""

    def __init__(self, width=32, heads=2, layers=2, classes=10):
        super().__init__()
        with self.init_scope():
            self.patches = L.Convolution2D(1, width, PATCH, PATCH)
            self.places = chainer.Parameter(chainer.initializers.Normal(1), (1, width, 16))
            self.layers = chainer.ChainList(*(Encoder(width, heads) for _ in range(layers)))
            self.norm, self.head = L.LayerNormalization(width), L.Linear(width, classes)

    def forward(self, images):
        x = self.patches(images)
        x = F.reshape(x, (*x.shape[:2], -1))  # (B, C, T)
        x += F.broadcast_to(self.places, x.shape)
        for layer in self.layers:
            x = layer(x)
        return self.head(F.mean(normalise(self.norm, x), axis=2))


def normalise(norm, x):
    """Layer normalisation over the channels of (B, C, T)."""
    x = F.transpose(x, (0, 2, 1))
    return F.transpose(F.reshape(norm(F.reshape(x, (-1, x.shape[2]))), x.shape), (0, 2, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default: a GPU if there is one")
    parser.add_argument("--epochs", type=POSITIVE, default=10)
    arguments = parser.parse_args()
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("The digits are scikit-learn's: pip install scikit-learn")
    xp = select(arguments.device)
    device = chainer.get_device("@numpy" if xp is np else "@cupy:0")
    device.use()

    np.random.seed(0)  # noqa: NPY002, Chainer's generator
    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)  # (1797, 1, 8, 8)
    data = chainer.datasets.TupleDataset(images, digits.target.astype(np.int32))
    train, test = chainer.datasets.split_dataset_random(data, 1437, seed=0)

    model = L.Classifier(VisionTransformer())
    model.to_device(device)
    print(f"{describe(xp)}; {len(train)} images, {model.count_params()} parameters, float32")
    optimizer = chainer.optimizers.Adam(2e-3).setup(model)
    batches = chainer.iterators.SerialIterator(train, 32)
    updater = StandardUpdater(batches, optimizer, device=device)
    trainer = Trainer(updater, (arguments.epochs, "epoch"), out=".")
    once = chainer.iterators.SerialIterator(test, 360, repeat=False, shuffle=False)
    trainer.extend(extensions.Evaluator(once, model, device=device))
    # Writes no file, and so needs no folder `out`: filename=None would mean the name "log".
    trainer.extend(extensions.LogReport(trigger=(1, "epoch"), log_name=None))
    columns = ["epoch", "main/loss", "main/accuracy", "validation/main/accuracy"]
    trainer.extend(extensions.PrintReport(columns))
    start = time.perf_counter()
    trainer.run()
    accuracy = trainer.observation["validation/main/accuracy"]
    seconds = time.perf_counter() - start
    print(f"accuracy on {len(test)} unseen images: {float(accuracy):.3f}, in {seconds:.1f} s")


if __name__ == "__main__":
    main()
