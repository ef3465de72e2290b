"""Which repeated calls on device arrays are taken for the same call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupyflash import _recipe
from cupyflash._options import Options


class FakeArray:
    """What a recipe asks of CuPy's arrays."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, pointer: int, shape: tuple[int, ...] = (2, 4)) -> None:
        self.data = SimpleNamespace(ptr=pointer, device_id=0)
        self.shape, self.strides, self.dtype = shape, (4 * shape[-1], 4), np.dtype(np.float32)


class Scalar:
    """A number in memory of its own, as other frameworks have them; hashed by identity."""


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_recipe, "is_cupy", lambda x: isinstance(x, FakeArray))


def inputs() -> tuple[Any, Any, Any]:
    query, key, value = (FakeArray(pointer, (2, 8, 4, 16)) for pointer in (1024, 2048, 4096))
    return query, key, value


def key(**options: Any) -> Any:
    return _recipe._key(*inputs(), Options(**options))


def test_factors_in_device_memory_are_known_by_all_but_the_pointer() -> None:
    assert hash(key(v_descale=FakeArray(512))) == hash(key(v_descale=FakeArray(768)))
    first = key(v_descale=FakeArray(512))
    assert first == key(v_descale=FakeArray(768))
    assert first != key(v_descale=FakeArray(512, (1, 4)))
    assert first != key(k_descale=FakeArray(512))
    assert first != key(v_descale=FakeArray(514)), "which no kernel can read"
    looks_alike = ((2, 4), (16, 4), np.dtype(np.float32), 0, 0)
    with pytest.raises(TypeError):
        key(v_descale=looks_alike)


def test_numbers_are_known_by_their_value_and_type() -> None:
    assert key(v_descale=2.0) == key(v_descale=2.0)
    assert key(v_descale=2.0) != key(v_descale=3.0)
    assert key(v_descale=2.0) != key(v_descale=np.float32(2.0))
    assert key(causal=True) != key(causal=1)


@pytest.mark.parametrize(
    "factor", [Scalar(), np.full((1, 1), 2, np.float32), np.array(2, np.float32)]
)
def test_what_may_change_in_place_is_never_known(factor: Any) -> None:
    with pytest.raises(TypeError):
        key(q_descale=factor)
    assert _recipe.find(*inputs(), Options(q_descale=factor)) is None
