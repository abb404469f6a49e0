#!/bin/sh
# kvcached under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer: the C++ stress driver under both
# builds, and the Python tests of prism.memory with the extension built with address and undefined-behaviour checks.
#   scripts/sanitize.sh [rounds of the stress driver, default 400]
# Needs an installed .venv (make install) and a compiler with the sanitizers' libraries. Builds into build/sanitize.
set -eu
cd "$(dirname "$0")/.."
ROUNDS=${1:-400}
PYTHON=$PWD/.venv/bin/python
CMAKE=$PWD/.venv/bin/cmake
OUT=$PWD/build/sanitize
export PATH="$PWD/.venv/bin:$PATH"

build() { # name, sanitizers, python extension ON/OFF
  "$CMAKE" -S csrc/kvcached -B "$OUT/$1" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DKVCACHED_SANITIZE="$2" \
    -DKVCACHED_STRESS=ON -DKVCACHED_PYTHON="$3" -DPython_EXECUTABLE="$PYTHON" >"$OUT-$1.log" 2>&1 || { cat "$OUT-$1.log"; exit 1; }
  "$CMAKE" --build "$OUT/$1" >>"$OUT-$1.log" 2>&1 || { cat "$OUT-$1.log"; exit 1; }
}
mkdir -p "$OUT"

echo "[1/3] thread sanitizer: C++ stress"
build thread thread OFF
TSAN_OPTIONS="halt_on_error=1" "$OUT/thread/kvcached_stress" "$ROUNDS"

echo "[2/3] address and undefined-behaviour sanitizers: C++ stress"
build address address,undefined ON
ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 "$OUT/address/kvcached_stress" "$ROUNDS"

echo "[3/3] address and undefined-behaviour sanitizers: Python tests"
# The interpreter itself is not instrumented and never frees everything, so leaks are looked for in the stress driver only.
# The sanitized extension takes the place of the installed one through KVCACHED_EXTENSION (see tests/conftest.py).
PRELOAD="$(${CXX:-c++} -print-file-name=libasan.so):$(${CXX:-c++} -print-file-name=libubsan.so):$(${CXX:-c++} -print-file-name=libstdc++.so)"
EXTENSION=$(ls "$OUT"/address/_kvcached*.so)
LD_PRELOAD="$PRELOAD" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 PYTHONMALLOC=malloc \
  KVCACHED_EXTENSION="$EXTENSION" "$PYTHON" -m pytest -q -n 2 tests/memory tests/kv/test_piece_index.py tests/kv/test_piece_memory.py \
  -m "not gpu and not slow" -p no:cacheprovider
