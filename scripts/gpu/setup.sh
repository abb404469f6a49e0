#!/usr/bin/env bash
# On the machine with the GPU, in the repository's root: unpack parts of the kit, each once, and build Prism's extension.
#   scripts/gpu/setup.sh A [B]        then: export PYTHONPATH=/tmp/prism-kit-site
# PYTHON names the interpreter (default python3), PRISM_KIT_SITE the folder.
set -euo pipefail
python=${PYTHON:-python3}
site=${PRISM_KIT_SITE:-/tmp/prism-kit-site}
export PYTHONPATH="$site"
for part in "$@"; do
  [ -e "$site/.part-$part" ] && continue
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" .gpu-kit/"$part"/*.whl
  touch "$site/.part-$part"
done
"$python" -c 'import prism.memory' 2>/dev/null || "$python" -m pip install -q --no-index --no-deps --no-build-isolation -e .
"$python" -c 'import prism.memory; print("prism.memory is built and imports")'
