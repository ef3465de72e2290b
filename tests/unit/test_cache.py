"""The cubin cache: what is kept, what is noticed, what several threads and processes do."""

import hashlib
import multiprocessing
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cupyflash._cuda import cache, warn

DATA = bytes(range(256)) * 64
KEY = cache.key_of(["stub"])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(warn, "_given", set())
    monkeypatch.setattr(cache, "_unstored", {})
    return tmp_path / "cache"


def fetch(build=lambda: DATA) -> cache.Cubin:
    return cache.fetch("kernel", KEY, "// stub\n", build)


def unexpected() -> bytes:
    raise AssertionError("compiled although the cache has it")


def test_the_second_fetch_reads_what_the_first_one_stored(folder: Path) -> None:
    first, second = fetch(), fetch(unexpected)
    assert first == second
    assert second.path == folder / f"kernel-{KEY}.cubin"
    assert second.path.read_bytes() == DATA
    assert second.path.with_suffix(".cu").read_text().endswith("\n// stub\n")
    assert cache.entries() == [second.path]
    assert not list(folder.glob("*.partial"))


def test_size_and_clear_count_only_what_the_cache_wrote(folder: Path) -> None:
    assert (cache.size(), cache.clear()) == (0, 0)
    fetch()
    (folder / "own.cu").write_text("the user's")
    assert cache.size() > len(DATA)
    assert cache.clear() == 1
    assert [file.name for file in folder.iterdir()] == ["own.cu"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(DATA[:-1]),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(DATA[:100] + b"?" + DATA[101:]),
        lambda file: file.with_suffix(".cu").unlink(),
        lambda file: file.with_suffix(".cu").write_bytes(b"\xff\xfe"),
    ],
)
def test_a_damaged_kernel_is_compiled_anew(damage) -> None:
    damage(fetch().path)
    compiled = []
    assert fetch(lambda: compiled.append(1) or DATA).data == DATA
    assert compiled == [1]
    assert fetch(unexpected).data == DATA


def test_a_failed_build_leaves_nothing_and_is_tried_again(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        fetch(lambda: 1 // 0)
    assert not folder.exists()
    assert fetch().data == DATA


def test_an_unusable_folder_warns_once_and_keeps_kernels_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match=r"file.cache.*Set CUPYFLASH_CACHE_DIR"):
        assert fetch() == cache.Cubin(DATA, None)
    assert fetch(unexpected) == cache.Cubin(DATA, None)  # a second warning would be an error here
    other = cache.fetch("kernel", cache.key_of(["other"]), "", lambda: b"other")
    assert other == cache.Cubin(b"other", None)
    assert (cache.entries(), cache.size(), cache.clear()) == ([], 0, 0)


def test_a_kernel_that_cannot_be_read_warns_and_is_compiled(folder: Path) -> None:
    cubin = folder / f"kernel-{KEY}.cubin"
    cubin.mkdir(parents=True)
    cubin.with_suffix(".cu").write_text("// stub\n")
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        assert fetch().data == DATA


def test_one_thread_compiles_and_the_others_wait() -> None:
    compiled = []

    def build() -> bytes:
        compiled.append(threading.get_ident())
        time.sleep(0.05)
        return DATA

    with ThreadPoolExecutor(8) as pool:
        results = [job.result() for job in [pool.submit(fetch, build) for _ in range(16)]]
    assert len(compiled) == 1
    assert {result.data for result in results} == {DATA}


def race(start) -> str:
    start.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return hashlib.sha256(fetch().data).hexdigest()


def test_processes_that_race_leave_one_valid_file(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(8) as pool:
        start = manager.Barrier(8)
        digests = pool.map(race, [start] * 8, chunksize=1)
    assert set(digests) == {hashlib.sha256(DATA).hexdigest()}
    assert sorted(file.suffix for file in folder.iterdir()) == [".cu", ".cubin"]
    assert fetch(unexpected).data == DATA


def test_every_part_and_its_length_counts_in_the_key() -> None:
    keys = {cache.key_of(parts) for parts in (["ab", "c"], ["a", "bc"], ["abc"], ["c", "ab"], [])}
    assert len(keys) == 5


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x"}, Path("/x/cupyflash")),
        ("linux", {}, Path.home() / ".cache/cupyflash"),
        ("darwin", {}, Path.home() / "Library/Caches/cupyflash"),
        ("win32", {"LOCALAPPDATA": "/local"}, Path("/local/cupyflash")),
    ],
)
def test_the_folder_is_the_users_cache(platform, variables, expected, monkeypatch) -> None:
    for name in ("CUPYFLASH_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.platform", platform)
    assert cache.path() == expected


def test_a_user_without_a_home_gets_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("CUPYFLASH_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        assert fetch() == cache.Cubin(DATA, None)


def test_a_failed_source_is_kept_somewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = cache.save_failed("broken")
    assert saved.parent == folder
    assert saved.read_text() == "broken"
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(saved / "under-a-file"))
    elsewhere = cache.save_failed("broken")
    assert elsewhere.read_text() == "broken"
    elsewhere.unlink()
