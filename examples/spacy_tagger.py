"""Train a spaCy tagger whose encoder is a transformer with attention by cupyflash.

    python examples/spacy_tagger.py [--device cpu|gpu] [--steps 60]

In "they hardly ever really run ." and "the hardly ever really run ." the tag of "run" hangs on a
word up to a dozen tokens back. spaCy's own convolutional encoder sees four tokens; attention sees
all. Needs spaCy: pip install spacy
"""

import argparse
import random
import sys
import time

from cupyflash._demo.arguments import POSITIVE
from cupyflash._demo.device import describe, select
from cupyflash._demo.progress import progress

WORDS = ["run", "race", "walk", "talk", "dance", "climb", "swim", "drive", "fly", "hike"]
FILLERS = ["hardly", "ever", "really", "quite", "nearly", "almost", "rather"]
LONGEST_GAP = 12
WIDTH = 64

EMBED = {
    "@architectures": "spacy.MultiHashEmbed.v2",
    "width": WIDTH,
    "attrs": ["NORM"],
    "rows": [500],
    "include_static_vectors": False,
}
ENCODERS = {
    "convolution (spaCy)": {
        "@architectures": "spacy.MaxoutWindowEncoder.v2",
        "width": WIDTH,
        "depth": 4,
        "window_size": 1,
        "maxout_pieces": 3,
    },
    "attention (cupyflash)": {
        "@architectures": "cupyflash.TransformerEncoder.v1",
        "width": WIDTH,
        "depth": 2,
        "num_heads": 4,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default: a GPU if there is one")
    parser.add_argument("--steps", type=POSITIVE, default=60)
    parser.add_argument("--batch", type=POSITIVE, default=32, help="sentences a step")
    arguments = parser.parse_args()
    try:
        import spacy
    except ImportError:
        sys.exit("This example needs spaCy: pip install spacy")
    xp = select(arguments.device)
    if xp.__name__ == "cupy":
        spacy.require_gpu()

    print(f"{arguments.steps} steps of {arguments.batch} sentences on {describe(xp)}")
    print(f"{'encoder':24}{'near':>8}{'far':>8}{'time':>10}   right on ambiguous words")
    for name, encoder in ENCODERS.items():
        spacy.util.fix_random_seed(0)
        start = time.perf_counter()
        tagger = train(encoder, arguments.steps, arguments.batch)
        seconds = time.perf_counter() - start
        near, far = (accuracy(tagger, gaps) for gaps in (range(4), range(8, LONGEST_GAP + 1)))
        print(f"{name:24}{near:8.0%}{far:8.0%}{seconds:8.1f} s")


def train(encoder: dict, steps: int, batch: int):
    import spacy
    from spacy.training import Example

    nlp = spacy.blank("en")
    tok2vec = {"@architectures": "spacy.Tok2Vec.v2", "embed": EMBED, "encode": encoder}
    model = {"@architectures": "spacy.Tagger.v2", "tok2vec": tok2vec}
    nlp.add_pipe("tagger", config={"model": model})
    drawn = random.Random(0)

    def draw() -> list:
        sentences = [sentence(drawn, drawn.randint(0, LONGEST_GAP)) for _ in range(batch)]
        return [
            Example.from_dict(nlp.make_doc(" ".join(words)), {"tags": tags})
            for words, tags in sentences
        ]

    optimizer = nlp.initialize(draw)
    optimizer.learn_rate = 0.003
    for _ in progress(range(steps), "training"):
        nlp.update(draw(), sgd=optimizer, drop=0.1)
    return nlp


def sentence(drawn: random.Random, gap: int) -> tuple[list[str], list[str]]:
    """Words and tags; `gap` fillers stand between the cue and the ambiguous word."""
    cue, cue_tag, tag = drawn.choice([("the", "DET", "NOUN"), ("they", "PRON", "VERB")])
    fillers = drawn.choices(FILLERS, k=gap)
    words = [cue, *fillers, drawn.choice(WORDS), "."]
    return words, [cue_tag, *["ADV"] * gap, tag, "PUNCT"]


def accuracy(nlp, gaps: range) -> float:
    """Share of ambiguous words that get the right tag, in sentences that were not trained on."""
    drawn = random.Random(1)
    sentences = [sentence(drawn, drawn.choice(gaps)) for _ in range(200)]
    docs = nlp.pipe(" ".join(words) for words, _ in sentences)
    right = [doc[-2].tag_ == tags[-2] for doc, (_, tags) in zip(docs, sentences, strict=True)]
    return sum(right) / len(right)


if __name__ == "__main__":
    main()
