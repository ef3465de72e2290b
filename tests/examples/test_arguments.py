"""What the examples refuse on their command lines: at once, in one line, with status 2."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from importlib.util import find_spec
from pathlib import Path

import pytest

from cupyflash._demo.arguments import existing_file, file_to_write, some_text, whole
from tests.examples.conftest import ROOT

WRONG = {
    "bias_gradient": ["--steps 0"],
    "block_sparse": ["--block 0", "--tokens 0"],
    "exact_vs_approximate": ["--length 0", "--heads 0", "--head-dim 257", "--plot no/a.png"],
    "generate": ["--contexts 5 0", "--tokens 1.5", "--plot no/a.png"],
    "gpt_chainer": ["--steps 0", "--context 0", "--context 133464", "--batch 0", "--plot no/a.png"],
    "long_sequence": ["--lengths 8 0", "--heads 0", "--head-dim 300", "--plot no/a.png"],
    "protein_length": ["--length 0", "--heads 0", "--head-dim 300", "--limit 0"],
    "sentence_embeddings": [
        "--file no.txt",
        "--top -1",
        "--query=",
        "--save no/x.npy",
        "--save x.txt",
    ],
    "spacy_tagger": ["--steps 0", "--batch 0"],
    "speech_encoder": ["--audio no.wav"],
    "text_generation": ["--prompt=", "--tokens 0"],
    "vit_chainer": ["--epochs 0"],
}


@pytest.mark.parametrize(
    ("example", "wrong"), [(example, wrong) for example, all_ in WRONG.items() for wrong in all_]
)
def test_wrong_arguments(run, example, wrong):
    if example.endswith("_chainer") and find_spec("chainer") is None:
        pytest.skip("no Chainer")
    output = run(ROOT / "examples" / f"{example}.py", *wrong.split(), status=2)
    usage, _, error = output.rstrip().rpartition("\n")
    option = wrong.replace("=", " ").split()[0]
    assert usage.startswith("usage: ") and f"error: argument {option}: " in error


def test_whole_numbers():
    assert [whole(1)("7"), whole(-3, 2)("-3"), whole(-3, 2)("2")] == [7, -3, 2]
    for text in ("0", "x", "1.5", ""):
        with pytest.raises(ArgumentTypeError, match=f"1 or more, got '{text}'"):
            whole(1)(text)
    with pytest.raises(ArgumentTypeError, match="from 1 to 3, got '4'"):
        whole(1, 3)("4")


def test_texts_and_files(tmp_path):
    assert some_text(" ") == " "
    with pytest.raises(ArgumentTypeError, match="is empty"):
        some_text("")
    assert existing_file(__file__) == Path(__file__)
    with pytest.raises(ArgumentTypeError, match="there is no file"):
        existing_file(str(tmp_path))


def test_files_to_write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    convert = file_to_write(".png", ".svg")
    Path("there.png").touch()
    Path("folder.png").mkdir()
    names = {"new.svg": "new.svg", "there.png": "there.png", "a.PNG": "a.PNG", "a": "a.png"}
    assert {name: convert(name).name for name in names} == names
    for name, message in {
        "a.txt": "must end in .png or .svg, got 'a.txt'",
        "no/a.png": "there is no folder no",
        "there.png/a.png": "there is no folder there.png",
        "folder.png": "folder.png cannot be written",
    }.items():
        with pytest.raises(ArgumentTypeError, match=message):
            convert(name)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ArgumentTypeError, match=r"new\.svg cannot be written"):
        convert("new.svg")
