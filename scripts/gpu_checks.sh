#!/usr/bin/env bash
# All that needs a GPU before a release, part by part: gpu_checks.sh FOLDER [PART ...]
#
# Parts: record, sanitize, bench, features, decode, tune, examples. Each writes its log, and
# what it measures, into FOLDER; a part that fails or takes too long does not stop the others. PYTHON
# names the interpreter (default: python3), WORKERS the tests that run side by side (default: 8).
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3} workers=${WORKERS:-8}
mkdir -p "${1:?a folder for logs and figures}"
folder=$(cd "$1" && pwd)
shift
[ $# -gt 0 ] || set -- record sanitize bench features decode tune examples

record() { # the whole GPU suite; the record is written if everything passed
  # One thread of OpenBLAS each, as tests that run side by side share the cores.
  OPENBLAS_NUM_THREADS=1 timeout 600 "$python" tests/device_record.py write -n "$workers" -q --tb=short || return
  cp tests/device_record.json "$folder"
}
sanitize() { # every tool with every part side by side, each with a log
  timeout 300 "$python" -m tests.sanitize || return # compiles, which would take long under a tool
  local tool part log job jobs=() status=0
  for part in simt:{0..5} mma wgmma cache; do
    for tool in memcheck synccheck racecheck; do
      log="$folder/sanitize-$part-$tool.log"
      timeout 300 compute-sanitizer --tool "$tool" --error-exitcode 1 "$python" -m tests.sanitize "$part" \
        > "${log/:/-}" 2>&1 &
      jobs+=($!)
    done
  done
  for job in "${jobs[@]}"; do wait "$job" || status=1; done
  return "$status"
}
bench() {
  timeout 300 "$python" -m cupyflash bench --rounds 3 --json "$folder/bench.json"
}
features() {
  timeout 300 "$python" -m cupyflash bench --features --engine mma --shapes 4,4096,16,128 \
    --masks full --dtype float16 --json "$folder/features.json"
}
decode() {
  timeout 300 "$python" -m cupyflash bench --decode --json "$folder/decode.json"
}
tune() { # the grid of the Hopper engine's short calls; mma's slowest point
  timeout 300 "$python" -m cupyflash bench --tune --directions forward \
    --shapes 32,512,32,64 16,1024,32,64 32,512,16,128 32,512,8,256
  timeout 120 "$python" -m cupyflash bench --tune --engine mma --directions forward \
    --shapes 32,512,8,256 --masks full
}
examples() {
  timeout 600 "$python" scripts/run_examples.py "$folder/examples"
}

for part in "$@"; do
  declare -F "$part" > /dev/null || { echo "no part is called $part"; exit 2; }
done
failed=()
for part in "$@"; do
  start=$SECONDS
  "$part" > "$folder/$part.log" 2>&1 || failed+=("$part")
  echo "$part: $((SECONDS - start)) s; $(tail -n 1 "$folder/$part.log")"
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
