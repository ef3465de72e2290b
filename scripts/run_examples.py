"""Run the examples and keep what they print and plot: ``run_examples.py FOLDER [--device cpu]``.

On a GPU unless told otherwise, each in a process of its own and with its own defaults. FOLDER gets
their plots and examples.log; the exit status is 1 if one failed, 2 if a name is wrong.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LOG = "examples.log"
TERMINAL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # Chainer's reports move the cursor


class Outcome(NamedTuple):
    """What an example printed, on both channels, and whether it came to its end."""

    output: str
    seconds: float
    passed: bool


def main(arguments: list[str], examples: Path = ROOT / "examples") -> int:
    """Command line."""
    names = sorted(path.stem for path in examples.glob("*.py"))
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the log and the plots go")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="gpu")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--timeout", type=float, default=300, help="seconds that each may take")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    failed = []
    chosen = options.only or names
    with (options.folder / LOG).open("w", encoding="utf-8") as log:
        for count, name in enumerate(chosen, 1):
            print(f"{count:2} of {len(chosen)}  {name:22}", end="", flush=True)
            command = [examples / f"{name}.py", "--device", options.device]
            outcome = run(command, options.folder, options.timeout)
            verdict = "passed" if outcome.passed else "FAILED"
            print(f"{verdict} in {outcome.seconds:.1f} s", flush=True)
            log.write(f"=== {name}: {verdict} in {outcome.seconds:.1f} s\n{outcome.output}\n")
            log.flush()
            if not outcome.passed:
                failed.append(name)
                print(f"    {last_line(outcome.output)}")
    print(f"{len(chosen) - len(failed)} passed, {len(failed)} failed; see {options.folder / LOG}")
    return 1 if failed else 0


def run(command: list[Path | str], folder: Path, timeout: float) -> Outcome:
    """Run ``python COMMAND`` in `folder`, with the package of this checkout."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *map(str, command)], cwd=folder, env=environment, timeout=timeout,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        output, passed = done.stdout, done.returncode == 0
    except subprocess.TimeoutExpired as error:
        output, passed = (error.output or b"") + b"\nstopped: it took too long\n", False
    text = TERMINAL.sub("", output.decode(errors="replace"))
    return Outcome(text, time.monotonic() - start, passed)


def last_line(output: str) -> str:
    """Return the line that says what went wrong, in a traceback and elsewhere."""
    return next(reversed(output.strip().splitlines()), "it printed nothing")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
