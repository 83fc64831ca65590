#!/usr/bin/env bash
# Make a folder of wheels to carry to the GPU machine: ours, and those of packages that the machine
# lacks. Wheels that are in the folder are deleted first. Usage: pack.sh [FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
folder=${1:-$here/wheels}

mkdir -p "$folder"
rm -f "$folder"/*.whl
python -m build --wheel --outdir "$folder" "$root" > /dev/null
python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 \
    --constraint "$root/constraints.txt" --dest "$folder" \
    array-api-compat fla-core==0.6.0 flash-linear-attention==0.6.0
# The extras but `kernels`, which is for machines without a GPU.
python -m precondattn_gpu.packing "$folder" --machine "$here/machine.txt" \
    --extra torch --extra triton --extra jax --extra cupy --extra conformance --extra bench

cat <<'TEXT'

On the GPU machine, with this folder as FOLDER:

python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site FOLDER/*.whl
export PYTHONPATH=/tmp/site
python3 -m precondattn_gpu --list
python3 -m precondattn_gpu --stage alive --out RESULTS
TEXT
