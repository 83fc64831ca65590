#!/usr/bin/env bash
# Make a folder to carry to the GPU machine: wheels of ours and of packages that the machine lacks, and
# the newest assembler of CUDA 13. Then print the two commands to run there.
#
#     pack.sh [FOLDER]
#
# Files of an earlier call are deleted first. Kernels are compiled on the GPU machine.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
folder=${1:-$here/wheels}
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT

download() { python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: "$@"; }

mkdir -p "$folder"
rm -f "$folder"/*.whl "$folder/ptxas.gz" "$folder/ready.sh"
python -m build --wheel --outdir "$folder" "$root" > /dev/null
download --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 \
    --constraint "$root/constraints.txt" --dest "$folder" \
    array-api-compat fla-core==0.6.0 flash-linear-attention==0.6.0
cp "$here/ready.sh" "$folder"

download --platform manylinux_2_17_x86_64 --dest "$work" "nvidia-cuda-nvcc==13.*"
python -m zipfile -e "$work"/nvidia_cuda_nvcc-*.whl "$work/nvcc"
gzip -9 < "$(find "$work/nvcc" -path '*/bin/ptxas')" > "$folder/ptxas.gz"

carried=$(realpath --relative-base "$root" "$folder")
kept=/tmp/precondattn/first
cat <<TEXT
On the GPU machine, in a copy of this tree with the folder in it. OUT is a folder for results.
The first, at most 510 s:

. $carried/ready.sh && python3 -m precondattn_gpu --first --out "\$OUT" --ptxas "\$PTXAS" --since "\$SINCE"; code=\$?; mkdir -p $kept; cp -r "\$OUT"/. $kept; exit \$code

The second, at most 180 s, on the same machine; on another one, --before is a folder with the results of the first:

. $carried/ready.sh && python3 -m precondattn_gpu --second --out "\$OUT" --ptxas "\$PTXAS" --since "\$SINCE" --before $kept
TEXT
