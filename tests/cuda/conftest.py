"""Every test in this folder runs on each GPU engine, and is skipped where there is no GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cupyflash import UnsupportedError
from tests.cases import DTYPES, ENGINE_DTYPES, GPU_ENGINES


def _reason_to_skip() -> str | None:
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    import cupy

    return None if cupy.cuda.is_available() else "no GPU"


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Mark this folder's tests, and drop shared ones that do not ask for an engine."""
    here, reason = Path(__file__).parent, _reason_to_skip()
    mine = [item for item in items if here in item.path.parents]
    for item in mine:
        item.add_marker(pytest.mark.cuda)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
    host_only = {
        item
        for item in mine
        if item.function.__module__.startswith("tests.unit.") and "engine" not in item.fixturenames
    }
    if host_only:
        config.hook.pytest_deselected(items=sorted(host_only, key=lambda item: item.nodeid))
        items[:] = [item for item in items if item not in host_only]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> Iterator[Any]:
    """Skip a test whose dtype, or whose arrays' strides, the engine under test does not serve."""
    try:
        return (yield)
    except UnsupportedError as error:
        if "its copy engine reads" in str(error):
            pytest.skip("wgmma, named by hand, does not read such arrays")
        served = ENGINE_DTYPES.get(pyfuncitem.funcargs.get("engine"), DTYPES)
        outside = [dtype for dtype in DTYPES if dtype not in served and dtype in str(error)]
        if not outside:
            raise
        pytest.skip(f"the engine does not serve: {outside[0]}")


@pytest.fixture(autouse=True)
def _memory_for_others() -> Iterator[None]:
    """Give back what a test has used, as processes that run tests side by side share the GPU."""
    import cupy  # skipped tests, as all are without it, set nothing up

    yield
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.fixture(scope="session", params=GPU_ENGINES)
def engine(request: Any) -> str:
    """The GPU engine under test, in place of tests/conftest.py's."""
    return request.param
