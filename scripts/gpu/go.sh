#!/usr/bin/env bash
# In the repository's root, on a machine with a GPU:  scripts/gpu/go.sh [STAGE...]     (numbers; default: 1 to 8)
# Runs the stages one after the other, for nine minutes in all; the same command goes on where it stopped.
# Without .venv (no `make install` here), or with PYTHON, the kit of .gpu-kit is unpacked first. Results are in PRISM_GPU_RESULTS and,
# if OUT names a folder, there as well; PRISM_GPU_MINUTES are the minutes; what follows `--` goes to every stage.
set -euo pipefail
cd "$(dirname "$0")/../.."
results=${PRISM_GPU_RESULTS:-/tmp/prism-gpu-results}
end=$((SECONDS + ${PRISM_GPU_MINUTES:-9} * 60))
stages=()
while [ $# -gt 0 ]; do
  [ "$1" = -- ] && { shift; break; }
  [[ $1 =~ ^[1-8]$ ]] || { echo "go.sh: there is no stage $1, only 1 to 8" >&2; exit 2; }
  stages+=("$1"); shift
done
[ ${#stages[@]} -gt 0 ] || stages=(1 2 3 4 5 6 7 8)
mkdir -p "$results"
cp -n .gpu-kit/results/*.json "$results" 2>/dev/null || true # of a machine before this one
if [ -x .venv/bin/python ] && [ -z "${PYTHON:-}" ]; then
  python=$PWD/.venv/bin/python
else
  python=${PYTHON:-python3}
  export PYTHONPATH=${PRISM_KIT_SITE:-/tmp/prism-kit-site}
  parts=(); for part in A B; do [ -d .gpu-kit/$part ] && parts+=("$part"); done
  [ ${#parts[@]} -gt 0 ] || { echo "go.sh: neither .venv nor .gpu-kit/A is here: make install, or bring the kit" >&2; exit 2; }
  # Weights and models lie in /dev/shm; some machines keep it small.
  free_kib=$(df --output=avail /dev/shm | tail -1)
  [ "$free_kib" -ge $((48 << 20)) ] || mount -o remount,size=80% /dev/shm 2>/dev/null || true
  PYTHON=$python scripts/gpu/setup.sh "${parts[@]}"
fi
status=0
for stage in "${stages[@]}"; do
  module=$(basename "$(ls scripts/gpu/stage"$stage"_*.py)" .py)
  left=$((end - SECONDS))
  [ $left -gt 10 ] || { echo "left     out of minutes; run the same command again for stage $stage and what follows"; status=1; break; }
  echo "== $module"
  "$python" -m "scripts.gpu.$module" --out "$results" --minutes "$(python3 -c "print($left / 60)")" "$@" || status=1
done
if [ -n "${OUT:-}" ] && [ "$(realpath -m "$OUT")" != "$(realpath -m "$results")" ]; then
  mkdir -p "$OUT" && cp "$results"/stage*.json "$OUT"
fi
exit $status
