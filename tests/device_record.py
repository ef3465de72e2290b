"""The record of the last run of tests/cuda on a GPU, and whether it still speaks for the code.

``write`` runs the GPU tests and stores tests/device_record.json, if everything passed; arguments
after it go to pytest. ``check`` fails if the kernels, or the Python that validates, plans and
launches, have changed since. ``pending --reason "..."`` says why they may, until the next run.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path(__file__).with_name("device_record.json")
COVERED = (  # what a GPU run vouches for
    "kernels/**/*.cuh",
    "kernels/**/*.cu",
    "cupyflash/_arrays.py",
    "cupyflash/_descale.py",
    "cupyflash/_dispatch.py",
    "cupyflash/_engines.py",
    "cupyflash/_extras.py",
    "cupyflash/_float8.py",
    "cupyflash/_hadamard.py",
    "cupyflash/_layout.py",
    "cupyflash/_options.py",
    "cupyflash/_problem.py",
    "cupyflash/_recipe.py",
    "cupyflash/_validate.py",
    "cupyflash/attention.py",
    "cupyflash/kvcache.py",
    "cupyflash/quantize.py",
    "cupyflash/state.py",
    "cupyflash/tiling.py",
    "cupyflash/varlen.py",
    "cupyflash/_cuda/**/*.py",
    "cupyflash/_kvcache/**/*.py",
)


def digest(root: Path = ROOT) -> str:
    """SHA-256 over the names and contents of everything covered."""
    total = hashlib.sha256()
    files = {path for pattern in COVERED for path in root.glob(pattern)}
    for path in sorted(files, key=lambda path: path.relative_to(root).as_posix()):
        content = path.read_bytes().replace(b"\r\n", b"\n")
        total.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return total.hexdigest()


def stale_because(record: dict[str, Any], now: str) -> str | None:
    """Return why the record does not speak for the code of digest `now`, or None if it does."""
    if record.get("digest") == now:
        return None
    pending = record.get("pending", {})
    if pending.get("digest") == now and pending.get("reason"):
        return None
    return (
        f"tests/device_record.json speaks for {str(record.get('digest'))[:12]}, but the covered "
        f"files are now {now[:12]}: run `python tests/device_record.py write` on a GPU machine, or "
        'say why not yet with `python tests/device_record.py pending --reason "..."`'
    )


def counts(junit: Path) -> dict[str, int]:
    """Return how many tests passed, failed and were skipped, from pytest's JUnit file."""
    total = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ElementTree.parse(junit).getroot().iter("testsuite"):
        for name in total:
            total[name] += int(suite.get(name, 0))
    failed = total["failures"] + total["errors"]
    return {
        "passed": total["tests"] - failed - total["skipped"],
        "failed": failed,
        "skipped": total["skipped"],
    }


def refusal(exit_status: int, result: dict[str, int], before: str, after: str) -> str | None:
    """Return why a run must not be recorded, or None."""
    if exit_status or result["failed"]:
        return f"not all tests passed: exit status {exit_status}, {result}"
    if not result["passed"]:
        return f"no test ran: {result}"
    return "the covered files changed during the run" if before != after else None


def machine() -> dict[str, Any]:
    """The device and the versions of what drives it."""
    import cupy
    from cupy.cuda import nvrtc, runtime

    properties = runtime.getDeviceProperties(0)
    return {
        "device": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "driver": runtime.driverGetVersion(),
        "cuda": runtime.runtimeGetVersion(),
        "nvrtc": ".".join(map(str, nvrtc.getVersion())),
        "cupy": cupy.__version__,
        "numpy": version("numpy"),
        "python": sys.version.split()[0],
    }


def write(path: Path, pytest_arguments: list[str]) -> int:
    """Run the GPU tests and store what happened, unless something failed or nothing ran."""
    before, junit = digest(), path.with_suffix(".junit.xml")
    command = [sys.executable, "-m", "pytest", "tests/cuda", f"--junitxml={junit}"]
    status = subprocess.run(command + pytest_arguments, cwd=ROOT, check=False).returncode
    if not junit.exists():
        print(f"nothing recorded: pytest wrote no results (exit status {status})")
        return 1
    result = counts(junit)
    junit.unlink()
    reason = refusal(status, result, before, digest())
    if reason:
        print(f"nothing recorded: {reason}")
        return 1
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    _store(path, machine() | result | {"date": today, "digest": before})
    print(f"recorded in {path.name}: {result}")
    return 0


def check(path: Path) -> int:
    """Compare the record with the code."""
    reason = stale_because(_load(path), digest())
    print(reason or "the device record speaks for this code")
    return 1 if reason else 0


def pending(path: Path, reason: str) -> int:
    """Note that the current code has not run on a GPU, and why; the last run stays recorded."""
    _store(path, _load(path) | {"pending": {"digest": digest(), "reason": reason}})
    return 0


def _load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def _store(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=2) + "\n", "utf-8")


def main(arguments: list[str]) -> int:
    """Command line; ``DEVICE_RECORD_OUT`` names another file to write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("write")
    commands.add_parser("check")
    commands.add_parser("pending").add_argument("--reason", required=True)
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "write":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command == "check":
        return check(RECORD)
    path = Path(os.environ.get("DEVICE_RECORD_OUT") or RECORD).resolve()
    if options.command == "pending":
        return pending(path, options.reason)
    return write(path, rest)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # not tests/, where a folder is named numpy
    sys.exit(main(sys.argv[1:]))
