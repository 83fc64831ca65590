#!/usr/bin/env bash
# Make a folder to carry to the GPU machine, of at most 44 MiB: wheels of ours and of packages that the
# machine lacks, the newest assembler of CUDA 13, and Triton's kernels, compiled for compute
# capability 9.0. Then print the two commands to run there.
#
#     pack.sh [FOLDER]
#
# Files of an earlier call are deleted first. Kernels are compiled in an environment with the
# machine's versions (twin.sh), in $TWIN, which is made if it does not exist. They are kept in
# $TWIN/triton_cache: after a change of the code, those that changed are compiled. $SECONDS_TO_COMPILE
# stops that early: the others are compiled on the machine. $JOBS is the number of processes.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
folder=${1:-$here/wheels}
twin=${TWIN:-$here/twin}
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT

download() { python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: "$@"; }

mkdir -p "$folder"
rm -f "$folder"/*.whl "$folder"/*.xz "$folder/ready.sh"
python -m build --wheel --outdir "$folder" "$root" > /dev/null
download --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 \
    --constraint "$root/constraints.txt" --dest "$folder" \
    array-api-compat fla-core==0.6.0 flash-linear-attention==0.6.0
cp "$here/ready.sh" "$folder"

download --platform manylinux_2_17_x86_64 --dest "$work" "nvidia-cuda-nvcc==13.*"
python -m zipfile -e "$work"/nvidia_cuda_nvcc-*.whl "$work/nvcc"
ptxas=$(find "$work/nvcc" -path '*/bin/ptxas')
chmod +x "$ptxas"

# The kernels are those of the wheel: Triton's key holds their text.
[ -x "$twin/bin/python" ] || "$here/twin.sh" "$twin" compiler
python -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
    --no-compile --target "$work/site" "$folder"/precondattn-*.whl
warm() { PYTHONPATH=$work/site "$twin/bin/python" -m "$@"; }
warm precondattn_gpu.warm "$twin/triton_cache" --ptxas "$ptxas" \
    ${SECONDS_TO_COMPILE:+--seconds "$SECONDS_TO_COMPILE"} ${JOBS:+--jobs "$JOBS"} || [ $? -eq 3 ]
warm precondattn_gpu.carried pack "$folder" \
    --wheel "$work"/nvidia_cuda_nvcc-*.whl --cache "$twin/triton_cache"

# The extras but `kernels`, which is for machines without a GPU.
PYTHONPATH=$work/site python -m precondattn_gpu.packing "$folder" --machine "$here/machine.txt" \
    --extra torch --extra triton --extra jax --extra cupy --extra conformance --extra bench

carried=$(realpath --relative-base "$root" "$folder")
kept=/tmp/precondattn/first
cat <<TEXT

On the GPU machine, in a copy of this tree with the folder in it. OUT is a folder for results.
The first, at most 510 s:

. $carried/ready.sh && python3 -m precondattn_gpu --first --out "\$OUT" --ptxas "\$PTXAS" --since "\$SINCE"; code=\$?; mkdir -p $kept; cp -r "\$OUT"/. $kept; exit \$code

The second, at most 180 s, on the same machine; on another one, --before is a folder with the results of the first:

. $carried/ready.sh && python3 -m precondattn_gpu --second --out "\$OUT" --ptxas "\$PTXAS" --since "\$SINCE" --before $kept
TEXT
