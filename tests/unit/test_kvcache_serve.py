"""Which calls on a cache the kernels of their own serve."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupyflash._kvcache.kernels import serve


def is_served(
    batch: int = 1, seqlen_q: int = 512, heads: tuple[int, int] = (32, 8), head_dim: int = 128,
    capacity: int = 8192, batch_invariant: bool = False,
) -> bool:  # fmt: skip
    def array(length: int, heads: int) -> Any:
        row = np.empty(head_dim, np.float16)
        return np.broadcast_to(row, (batch, length, heads, head_dim))

    cache = array(capacity, heads[1])
    call: Any = SimpleNamespace(
        query=array(seqlen_q, heads[0]),
        storage=SimpleNamespace(key=cache, value=cache, capacity=capacity),
        attention=SimpleNamespace(problem=SimpleNamespace(output_dtype="float16")),
        batch_invariant=batch_invariant,
    )
    return serve(call)


def test_few_rows_however_much_there_is_to_compute() -> None:
    assert is_served(64, 64, capacity=2**20)
    assert not is_served(64, 65, capacity=2**20)


def test_many_rows_where_there_is_little_to_compute() -> None:
    assert is_served(8)
    assert not is_served(9)
    assert not is_served(8, capacity=8193)


@pytest.mark.parametrize("seqlen_q", [64, 65])
def test_what_else_there_is_does_not_matter_to_an_entry_that_counts_on_it(seqlen_q: int) -> None:
    sizes = ((1, 100), (1, 8192), (8, 8192), (9, 8192), (500, 8192))
    served = {is_served(b, seqlen_q, capacity=n, batch_invariant=True) for b, n in sizes}
    assert served == {seqlen_q == 64}


def test_rows_that_an_int_counts() -> None:
    assert is_served(seqlen_q=2**25 - 1, heads=(64, 1), head_dim=1, capacity=16)
    assert not is_served(seqlen_q=2**25, heads=(64, 1), head_dim=1, capacity=16)
