"""`Launcher` against a driver that writes down what it is asked to do."""

import ctypes
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from cupyflash._cuda import device, launch
from cupyflash.errors import NoDeviceError

STRUCT = np.dtype(
    [("query", "u8"), ("key", "u8"), ("seqlen", "i4"), ("seed", "u8"), ("scale", "f4")], align=True
)


class FakeCuda:
    """CuPy's ``cuda`` as far as launching needs it; two devices."""

    def __init__(self) -> None:
        self.current = 0
        self.launches: list[tuple] = []
        self.contexts: list[int] = []
        self.runtime = SimpleNamespace(
            getDevice=lambda: self.current,
            setDevice=lambda number: setattr(self, "current", number),
            memGetInfo=lambda: self.contexts.append(self.current),
        )
        self.driver = SimpleNamespace(
            ctxGetCurrent=lambda: len(self.contexts), launchKernel=self.launch
        )

    def get_current_stream(self, device_id: int) -> SimpleNamespace:
        return SimpleNamespace(ptr=1000 + device_id)

    def launch(self, function, *arguments) -> None:
        *sizes, stream, pointers, extra = arguments
        struct_at = ctypes.c_void_p.from_address(pointers).value
        content = np.frombuffer(ctypes.string_at(struct_at, STRUCT.itemsize), STRUCT)[0]
        assert extra == 0
        self.launches.append((function, self.current, tuple(sizes), stream, content.item()))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(launch, "require_cupy", lambda: SimpleNamespace(cuda=fake))
    return fake


def make(device_id: int = 0, varying=("query", "key"), **settings) -> launch.Launcher:
    parameters = np.zeros(1, STRUCT)
    parameters["seqlen"], parameters["seed"], parameters["scale"] = -7, 2**64 - 1, 0.5
    function = SimpleNamespace(ptr=42)
    return launch.Launcher(
        function, device_id, parameters, varying, threads=128, shared_memory=1024, **settings
    )


def test_a_launch_sets_the_varying_fields_and_keeps_the_others(cuda: FakeCuda) -> None:
    launcher = make()
    launcher(3, 0xDEADBEEF00, 2**63)
    launcher(70000, 1, 2)
    sizes = (3, 1, 1, 128, 1, 1, 1024)
    assert cuda.launches == [
        (42, 0, sizes, 1000, (0xDEADBEEF00, 2**63, -7, 2**64 - 1, 0.5)),
        (42, 0, (70000, *sizes[1:]), 1000, (1, 2, -7, 2**64 - 1, 0.5)),
    ]


def test_padding_between_varying_fields_is_crossed(cuda: FakeCuda) -> None:
    make(varying=("seqlen", "seed", "scale"))(1, 5, 6, 0.25)
    assert cuda.launches[0][-1] == (0, 0, 5, 6, 0.25)


def test_a_table_is_that_of_the_stream_and_held_until_the_launch(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Copy:
        def __init__(self, ptr: int) -> None:
            self.data = SimpleNamespace(ptr=ptr)

    def on(stream: SimpleNamespace) -> Copy:
        copy = Copy(stream.ptr + 7)
        copies.append(weakref.ref(copy))
        return copy

    def driver(*arguments: object) -> None:
        alive.append(copies[-1]() is not None)
        cuda.launch(*arguments)

    copies: list[weakref.ref[Copy]] = []
    alive: list[bool] = []
    monkeypatch.setattr(cuda.driver, "launchKernel", driver)
    launcher = make(tables={"seed": SimpleNamespace(on=on)})
    launcher(1, 1, 2)
    monkeypatch.setattr(launcher, "_get_stream", lambda device_id: SimpleNamespace(ptr=50))
    launcher(1, 1, 2)
    assert [content for *_, content in cuda.launches] == [
        (1, 2, -7, 1007, 0.5), (1, 2, -7, 57, 0.5)
    ]  # fmt: skip
    assert alive == [True, True]


def test_an_empty_grid_is_not_launched(cuda: FakeCuda) -> None:
    make()(0, 1, 2)
    assert cuda.launches == []


def test_another_device_is_made_current_for_the_launch_only(cuda: FakeCuda) -> None:
    make(device_id=1)(1, 1, 2)
    assert cuda.launches[0][1] == 1
    assert cuda.launches[0][3] == 1001
    assert (cuda.current, cuda.contexts) == (0, [1])


def test_the_device_is_restored_after_an_error(cuda: FakeCuda) -> None:
    with pytest.raises(Exception, match="argument"):
        make(device_id=1)(1, -1, 2)
    assert cuda.current == 0


@pytest.mark.parametrize("varying", [("key", "query"), ("query", "seqlen"), ("scale", "query")])
def test_varying_fields_must_be_neighbours_in_order(cuda: FakeCuda, varying) -> None:
    with pytest.raises(ValueError, match="not neighbours"):
        make(varying=varying)


def test_threads_do_not_mix_their_values(cuda: FakeCuda) -> None:
    launcher = make()
    workers = [
        threading.Thread(target=lambda i=i: [launcher(1, i, i) for _ in range(200)])
        for i in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(cuda.launches) == 800
    assert all(content[0] == content[1] for *_, content in cuda.launches)


@pytest.mark.parametrize(
    ("cupy", "message"),
    [
        (None, "cannot be imported"),
        (SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(is_hip=True))), "ROCm"),
        (
            SimpleNamespace(
                __version__="14.2",
                cuda=SimpleNamespace(
                    runtime=SimpleNamespace(is_hip=False), is_available=lambda: False
                ),
            ),
            "no usable NVIDIA GPU",
        ),
    ],
)
def test_without_a_gpu_the_error_says_what_to_do(cupy, message, monkeypatch) -> None:
    device.require_cupy.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "cupy", cupy)
    with pytest.raises(NoDeviceError, match=message):
        device.require_cupy()


@pytest.mark.parametrize(("arch", "shared"), [("sm_75", 64), ("sm_86", 99), ("sm_90a", 227)])
def test_known_devices(arch: str, shared: int) -> None:
    assert device.Device.known(arch).shared_memory_per_block_optin == shared * 1024


def test_a_sequence_launches_all_with_the_same_struct(cuda: FakeCuda) -> None:
    functions = [SimpleNamespace(ptr=number) for number in (7, 8, 9)]
    kernels = [(functions[0], 3, 128, 0), (functions[1], 0, 32, 0), (functions[2], 5, 64, 2048)]
    sequence = launch.LaunchSequence(kernels, 1, np.zeros(1, STRUCT), ("query", "key"))
    cuda.contexts.append(1)
    cuda.current = 1
    sequence.run(sequence.current_stream(), (11, 12))
    struct = (11, 12, 0, 0, 0.0)
    assert cuda.launches == [
        (7, 1, (3, 1, 1, 128, 1, 1, 0), 1001, struct),
        (9, 1, (5, 1, 1, 64, 1, 1, 2048), 1001, struct),
    ]
