#!/usr/bin/env bash
# Tests and benchmarks on the first GPU of this machine, in less than ten minutes, without a network.
#
#   benchmarks/one_gpu.sh FOLDER           # PYTHON=.venv/bin/python selects the interpreter
#
# The clone need not be installed. The results are in FOLDER: machine.txt, doctor.md, devices.json,
# test_gpu.txt, benchmarks.md and benchmarks.json. Each part has a time limit, and the exit status is
# 1 if one failed. JAX_PLATFORMS=cpu is a dry run without a GPU: the rows CPU of the tests, small sizes.
set -uo pipefail
[ $# = 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
mkdir -p "$1" && out=$(cd "$1" && pwd) || exit 2
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 JAX_COMPILATION_CACHE_DIR=$out/cache

if [ "${JAX_PLATFORMS-}" = cpu ]; then
  tests=(--slow) sizes=(--quick)
else
  tests=(--gpu) sizes=()
fi
failed=0
part() {  # part SECS FILE COMMAND...: writes what the command prints to a file
  local start=$SECONDS result=ok
  timeout -k 5 "$1" "${@:3}" > "$out/$2" 2> "$out/$2.log" || result="FAILED ($?)" failed=1
  printf '%6d s  %-12s %s\n' $((SECONDS - start)) "$result" "$2"
}
part 10 machine.txt sh -c 'nvidia-smi; git log -1 --format="commit %h"; lscpu | grep "Model name"'
part 40 doctor.md "$python" -m mirror doctor --report
part 20 devices.json "$python" -m mirror devices --json
part 350 test_gpu.txt "$python" -m pytest -p mirror.pytest_plugin -p no:cacheprovider -n 0 -q --durations=0 \
  "${tests[@]}" tests/laws/test_gpu.py
# Without the cache, so that compiling is measured.
unset JAX_COMPILATION_CACHE_DIR
part 170 benchmarks.md "$python" -m benchmarks --suites gpu "${sizes[@]}" --markdown --json "$out/benchmarks.json"
tail -n 3 "$out/test_gpu.txt"
cat "$out/benchmarks.md"
exit $failed
