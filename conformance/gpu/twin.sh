#!/usr/bin/env bash
# An environment with the versions of the GPU machine (machine.txt), and what it shows without a GPU.
#
#     twin.sh FOLDER [STEP …]        all steps if none is given
#
# make      create the environment in FOLDER, with this source tree, from Python 3.12, which is
#           python3.12 or $PYTHON; uv is used if it is installed
# triton    compile all Triton kernels for sm_90
# pallas    lower all Pallas kernels, and compile those for sm_90
# peers     run the peers of the benchmarks, those of flash-linear-attention interpreted
# tests     the tests of the kernel backends, interpreted and simulated, and of the kernel tools
#
# CUDA kernels are compiled with the machine's NVRTC everywhere: constraints.txt has it.
#
# Reports are saved in docs/measurements/kernels/other_versions, and kernels that are in them are not
# compiled again; docs/make_pages.py summarises them.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
[ $# -ge 1 ] || { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2; exit 2; }
folder=$1
shift
base=${PYTHON:-python3.12}
python=$folder/bin/python
reports=docs/measurements/kernels/other_versions

install() {
    if command -v uv > /dev/null; then uv pip install --quiet --python "$python" "$@"
    else "$python" -m pip install --quiet --disable-pip-version-check "$@"; fi
}

make() {
    pins=$(mktemp)
    grep == "$here/machine.txt" > "$pins"
    if command -v uv > /dev/null; then uv venv --quiet --python "$base" "$folder"
    else "$base" -m venv "$folder"; fi
    # JAX's plugins for CUDA need a driver. CUDA is 13.0, as PyTorch requires.
    grep -v '^jax-cuda13' "$here/machine.txt" > "$pins.all"
    install --requirement "$pins.all" --constraint "$pins" --editable ".[conformance,bench,kernels]" \
        "nvidia-cuda-nvrtc==13.0.*" "nvidia-cuda-runtime==13.0.*" array-api-strict jsonschema sybil
    install --no-deps fla-core==0.6.0 flash-linear-attention==0.6.0
    rm "$pins" "$pins.all"
}

compile() {
    local language=$1 module=$2 report=$reports/$3
    shift 3
    local known=()
    [ ! -f "$report" ] || known=(--known "$report")
    "$python" -m "precondattn_kernel_tools.${language}_compiler" "$module" "$@" \
        --save "$report" ${known[@]+"${known[@]}"}
}

triton() { compile triton precondattn_triton.variants triton_3_6.json --target sm_90; }

pallas() {
    compile pallas precondattn_pallas.variants jax_0_11.json --target sm_90
    "$python" -m precondattn_kernel_tools.pallas_compiler precondattn_pallas.variants --target tpu
}

peers() {
    OMP_NUM_THREADS=1 "$python" -m pytest -q \
        tests/conformance/test_peers.py tests/conformance/test_fla_kernels.py
}

tests() {
    OMP_NUM_THREADS=1 "$python" -m pytest -q -n auto --dist loadfile \
        tests/backends/triton tests/backends/pallas tests/backends/cupy tests/kernel_tools
}

mkdir -p "$reports"
[ $# -gt 0 ] || set -- make triton pallas peers tests
for step in "$@"; do
    case $step in
        make | triton | pallas | peers | tests) ;;
        *) echo "$0: no step $step" >&2; exit 2 ;;
    esac
done
for step in "$@"; do
    echo "== $step"
    "$step"
done
