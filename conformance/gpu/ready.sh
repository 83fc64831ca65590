# Sourced on the GPU machine, from the folder that pack.sh made: installs its wheels and unpacks the
# assembler, once, and sets the variables with which they are found. SINCE is when it began.
SINCE=$(date +%s)
ready=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
there=/tmp/precondattn
export PYTHONPATH=$there/site PTXAS=$there/ptxas
[ -e "$there/ready" ] || {
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$there/site" "$ready"/*.whl &&
        gunzip < "$ready/ptxas.gz" > "$PTXAS" && chmod +x "$PTXAS" && touch "$there/ready"
}
