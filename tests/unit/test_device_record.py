"""The device record: it speaks for this code, and nothing but a real, passing run can make it."""

from __future__ import annotations

import pytest

from tests import device_record

PASSED = {"passed": 5, "failed": 0, "skipped": 1}


def test_the_record_speaks_for_this_code(capsys):
    assert device_record.check(device_record.RECORD) == 0, capsys.readouterr().out


def test_every_pattern_covers_something():
    for pattern in device_record.COVERED:
        if pattern != "kernels/**/*.cu":  # kept for the day when a kernel has a file of its own
            assert list(device_record.ROOT.glob(pattern)), pattern


@pytest.mark.parametrize("name", ["kernels/forward/mainloop.cuh", "cupyflash/_cuda/plan.py"])
def test_the_digest_sees_contents_and_names_but_not_line_ends(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"one\ntwo\n")
    first = device_record.digest(tmp_path)
    path.write_bytes(b"one\r\ntwo\r\n")
    assert device_record.digest(tmp_path) == first
    path.write_bytes(b"one\ntwo \n")
    second = device_record.digest(tmp_path)
    path.rename(path.with_stem("other"))
    assert len({first, second, device_record.digest(tmp_path)}) == 3
    (tmp_path / "README.md").write_text("not covered")
    path.with_stem("other").rename(path)
    assert device_record.digest(tmp_path) == second


@pytest.mark.parametrize(
    ("record", "fresh"),
    [
        ({"digest": "now"}, True),
        ({"digest": "old"}, False),
        ({}, False),
        ({"digest": "old", "pending": {"digest": "now", "reason": "no GPU yet"}}, True),
        ({"digest": "old", "pending": {"digest": "now", "reason": ""}}, False),
        ({"digest": "old", "pending": {"digest": "older", "reason": "no GPU yet"}}, False),
    ],
    ids=str,
)
def test_what_is_stale(record, fresh):
    reason = device_record.stale_because(record, "now")
    assert (reason is None) == fresh
    assert fresh or "device_record.py write" in reason


@pytest.mark.parametrize(
    ("status", "result", "after", "why"),
    [
        (0, PASSED, "a", None),
        (1, PASSED, "a", "passed"),
        (0, PASSED | {"failed": 1}, "a", "passed"),
        (0, PASSED | {"passed": 0}, "a", "no test ran"),
        (5, PASSED | {"passed": 0}, "a", "status 5"),
        (0, PASSED, "b", "changed"),
    ],
)
def test_what_is_refused(status, result, after, why):
    reason = device_record.refusal(status, result, "a", after)
    assert reason is None if why is None else why in reason


def test_counts_of_a_junit_file(tmp_path):
    path = tmp_path / "junit.xml"
    path.write_text(
        '<testsuites><testsuite tests="9" failures="1" errors="2" skipped="3"/></testsuites>'
    )
    assert device_record.counts(path) == {"passed": 3, "failed": 3, "skipped": 3}


def test_pending_keeps_the_last_run(tmp_path, capsys):
    path = tmp_path / "record.json"
    device_record._store(path, {"digest": "old", "device": "a GPU"})
    assert device_record.check(path) == 1 and "write" in capsys.readouterr().out
    device_record.pending(path, "the machine is away")
    assert device_record.check(path) == 0
    assert device_record._load(path)["device"] == "a GPU"
