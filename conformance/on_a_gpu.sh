#!/usr/bin/env bash
# Everything that only a GPU can show, of the kernels of the backends `triton`, `pallas` and `cupy`.
#
#     bash conformance/on_a_gpu.sh [FOLDER]
#
# Conformance in three dtypes, the smoke set under compute-sanitizer, and benchmarks beside their
# peers in the same run. Measurements go to FOLDER (docs/measurements) as JSON, by the GPU's name;
# docs/make_performance.py and docs/make_ledger.py then draw the pages from them.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-docs/measurements}
device=$(python -c 'import torch; print(torch.cuda.get_device_name())')
name=$(echo "$device" | tr 'A-Z -' 'a-z__')
export XLA_PYTHON_CLIENT_PREALLOCATE=false  # Or JAX leaves PyTorch nothing.
mechanisms=(lucid_solve 'lucid_solve[beta=true]' lucid 'lucid[beta=true]' laser 'laser(softmax[causal=false])'
    'lucid(laser)' unit_rows row_normalized path 'path[flush=64]' differential linear retention ssd gla gsa
    delta gated_delta 'ccq(gated_delta)')
options=(--device cuda --library torch --backend triton --backend torch)
for mechanism in "${mechanisms[@]}"; do options+=(--mechanism "$mechanism"); done
of_jax=(lucid_solve 'lucid_solve[beta=true]' lucid softmax laser linear retention ssd gla gsa delta gated_delta
    'ccq(gated_delta)')
jax_options=(--device cuda --library jax --backend pallas --backend jax)
for mechanism in "${of_jax[@]}"; do jax_options+=(--mechanism "$mechanism"); done

of_cupy=(lucid_solve 'lucid_solve[beta=true]' lucid softmax laser 'lucid(laser)' unit_rows row_normalized
    delta gated_delta 'ccq(gated_delta)')
cupy_options=(--device cuda --library cupy --backend cupy --backend portable)
for mechanism in "${of_cupy[@]}"; do cupy_options+=(--mechanism "$mechanism"); done

echo "== conformance on $device"
for dtype in float32 bfloat16 float16; do
    precondattn conformance "${options[@]}" --level full --dtype "$dtype"
    precondattn conformance "${jax_options[@]}" --level full --dtype "$dtype"
    precondattn conformance "${cupy_options[@]}" --level full --dtype "$dtype"
done

echo "== the smoke set under compute-sanitizer"
for tool in memcheck racecheck; do
    compute-sanitizer --tool "$tool" --target-processes all --error-exitcode 1 \
        precondattn conformance "${options[@]}" --level smoke
    compute-sanitizer --tool "$tool" --target-processes all --error-exitcode 1 \
        precondattn conformance "${cupy_options[@]}" --level smoke
done

echo "== benchmarks"
run() { precondattn bench --device cuda --dtype bfloat16 --backend triton,torch "$@"; }
sizes=()
for d in 64 128; do
    for bt in 8,2048 4,4096 2,8192 1,16384 1,65536; do
        sizes+=(--sizes "b=${bt%,*},t=${bt#*,},h=16,n=16,d=$d")
    done
done
run --mechanism lucid --mechanism laser --mechanism row_normalized \
    --work forward --work forward_backward "${sizes[@]}" --save "$folder/${name}_triton.json"
run --mechanism lucid --work forward --work forward_backward \
    --sizes b=2,t=8192,h=16,n=2,d=128 --save "$folder/${name}_triton_gqa.json"
run --mechanism lucid --work decode \
    --sizes b=8,t=32768,h=16,n=2,d=128 --save "$folder/${name}_triton_decoding.json"
# Beside flash-linear-attention, where it is installed.
family=()
for mechanism in gated_delta delta gla gsa retention path; do family+=(--mechanism "$mechanism"); done
of_family=()
for d in 64 128 256; do
    for bt in 4,2048 4,8192 1,16384; do of_family+=(--sizes "b=${bt%,*},t=${bt#*,},h=16,n=16,d=$d"); done
done
run "${family[@]}" --work forward --work forward_backward "${of_family[@]}" \
    --save "$folder/${name}_triton_linear.json"
run --mechanism 'ccq(gated_delta)' --mechanism 'ccq(gla)' --work forward --work forward_backward \
    --sizes b=1,t=4096,h=8,n=8,d=256,e=512 --sizes b=1,t=8192,h=8,n=8,d=256,e=512 \
    --save "$folder/${name}_triton_ccq.json"
run --mechanism gated_delta --mechanism path --work decode \
    --sizes b=8,t=32768,h=16,n=16,d=128 --save "$folder/${name}_triton_linear_decoding.json"
run --mechanism lucid --mechanism laser --work memory \
    --sizes b=1,t=32768,h=16,n=16,d=128 --save "$folder/${name}_triton_memory.json"

run_jax() { precondattn bench --device cuda --library jax --backend pallas,jax "$@"; }
run_jax --dtype bfloat16 --mechanism softmax --mechanism lucid --mechanism laser \
    --work forward --work forward_backward "${sizes[@]}" --save "$folder/${name}_pallas.json"
run_jax --dtype bfloat16 --mechanism gated_delta --mechanism 'ccq(gated_delta)' \
    --work forward --work forward_backward --sizes b=2,t=4096,h=16,n=16,d=128 \
    --save "$folder/${name}_pallas_gated_delta.json"
run_jax --dtype bfloat16 --mechanism lucid --work decode \
    --sizes b=8,t=32768,h=16,n=2,d=128 --save "$folder/${name}_pallas_decoding.json"

# Beside the portable backend on CuPy arrays, and beside the same in PyTorch, which is Triton's there.
run_cupy() { precondattn bench --device cuda --library cupy --backend cupy,portable "$@"; }
for dtype in bfloat16 float32; do
    run_cupy --dtype "$dtype" --mechanism softmax --mechanism lucid --mechanism laser \
        --mechanism row_normalized --mechanism gated_delta --mechanism 'ccq(gated_delta)' \
        --work forward --work forward_backward --sizes b=2,t=4096,h=16,n=16,d=128 \
        --save "$folder/${name}_cupy_${dtype}.json"
done
run_cupy --dtype bfloat16 --mechanism lucid --work decode \
    --sizes b=8,t=32768,h=16,n=2,d=128 --save "$folder/${name}_cupy_decoding.json"
