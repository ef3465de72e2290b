"""Seconds of a first call, with an empty cache and with a filled one.

``python -m cupyflash.bench.first_call`` prints them. Each comes from a fresh process, in which CuPy
and the GPU have started before the clock does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

from cupyflash._cuda.device import current, require_cupy
from cupyflash.attention import flash_attention_backward, flash_attention_forward
from cupyflash.bench.inputs import draw
from cupyflash.bench.workloads import HEAD_DIMS, Workload, parse_head_dim
from cupyflash.errors import NoDeviceError

MODULE = "cupyflash.bench.first_call"
_SUMMARY = "Print the seconds of a first call, with an empty cache and with a filled one."


def main() -> None:
    """Print the table, or, in the processes that it starts, the seconds of one head_dim."""
    parser = argparse.ArgumentParser(f"python -m {MODULE}", description=_SUMMARY)
    parser.add_argument(
        "head_dim", nargs="?", type=parse_head_dim, help="this one alone, in this process, as JSON"
    )
    head_dim = parser.parse_args().head_dim
    if head_dim is not None:
        print(json.dumps(first_calls(head_dim)))
        return
    print(f"{current().name}: seconds of the first call, bfloat16, causal, 1024 tokens")
    print("head_dim  cache   forward  backward")
    for head_dim in HEAD_DIMS:
        with TemporaryDirectory() as folder:
            for cache in ("empty", "filled"):
                forward, backward = in_fresh_process(head_dim, folder)
                print(f"{head_dim:<8}  {cache:<6}  {forward:7.3f}  {backward:8.3f}", flush=True)


def in_fresh_process(head_dim: int, cache: str) -> tuple[float, float]:
    """Return the seconds of the first forward and backward of a process with this cache folder."""
    done = subprocess.run(
        [sys.executable, "-m", MODULE, str(head_dim)],
        env=os.environ | {"CUPYFLASH_CACHE_DIR": cache},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    forward, backward = json.loads(done.stdout)
    return forward, backward


def first_calls(head_dim: int) -> tuple[float, float]:
    """Return the seconds of the first forward and backward of this process."""
    heads = 2048 // head_dim
    inputs = draw(Workload(1, 1024, 1024, heads, heads, head_dim, True, "bfloat16"))
    arrays = inputs.query, inputs.key, inputs.value
    _seconds(lambda: None)  # the GPU has started and the inputs are there
    forward, (_, saved) = _seconds(lambda: flash_attention_forward(*arrays, causal=True))
    backward, _ = _seconds(lambda: flash_attention_backward(inputs.grad_out, saved))
    return forward, backward


def _seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return how long `work` takes, the device's part included, and its result."""
    synchronize = require_cupy().cuda.runtime.deviceSynchronize
    start = time.perf_counter()
    result = work()
    synchronize()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    try:
        main()
    except NoDeviceError as error:
        sys.exit(str(error))
