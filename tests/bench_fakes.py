"""Contenders, inputs and times for tests of the benchmark, which need no GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cupyflash.bench.inputs import Inputs
from cupyflash.bench.peers import Ours
from cupyflash.bench.workloads import (
    Workload,
)

SMALL = Workload(2, 40, 40, 4, 2, 16, False, "float32")


def make_inputs(workload: Workload, rng: np.random.Generator) -> Inputs:
    rows = (workload.batch, workload.seqlen_q, workload.num_heads, workload.head_dim)
    columns = (workload.batch, workload.seqlen_k, workload.num_heads_kv, workload.head_dim)
    shapes = (rows, columns, columns, rows)
    return Inputs(*(rng.standard_normal(shape).astype(workload.dtype) for shape in shapes))


class Fake(Ours):
    """Ours under another name, with a fault."""

    def __init__(self, name: str, fault: Callable[[Any], Any] = lambda arrays: arrays) -> None:
        super().__init__()
        self.name = name
        self.fault = fault

    def arrays(self, result: Any) -> Sequence[Any]:
        return self.fault(super().arrays(result))


def crash(arrays: Any) -> Any:
    raise RuntimeError("no kernel\nfor this device")


def fake_times(works: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    for work in works.values():
        work()
    return {name: 1.0 + number for number, name in enumerate(works)}
