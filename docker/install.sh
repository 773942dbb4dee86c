#!/usr/bin/env bash
# Install Sinew for one role into a new virtual environment. The Dockerfile runs this, and so does `make roles`.
#
#   docker/install.sh ROLE FOLDER
#
# client   what a robot needs: numpy, protobuf
# onnx     a server without torch, for folders of `sinew export`
# cpu      all engines but cuda; TORCH_INDEX names an index of CPU builds of torch, which are 2.5 GB smaller to download
# cuda     all engines, torch with CUDA as package indexes have it
# jetson   all engines, over the torch that the system's Python has already
#
# PYTHON: the interpreter. EXTRAS: more extras, comma-separated, as lerobot,hub. WHEELS: folder of built wheels; they
# are built from this checkout if it is empty or absent. CONSTRAINTS: a file, or nothing for the newest versions.
set -euo pipefail

role=${1:?"expected a role: client, onnx, cpu, cuda or jetson"}
folder=${2:?"expected a folder"}
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
constraints=${CONSTRAINTS-$source/constraints.txt}
wheels=${WHEELS:-$folder.wheels}

case $role in
    client | onnx | cpu | cuda) "$python" -m venv "$folder" ;;
    jetson)
        "$python" -c 'import torch' \
            || { echo "jetson: $python has no torch; take NVIDIA's build for this JetPack" >&2; exit 1; }
        "$python" -m venv --system-site-packages "$folder"
        ;;
    *) echo "$role: expected client, onnx, cpu, cuda or jetson" >&2; exit 2 ;;
esac
pip=("$folder/bin/python" -m pip --disable-pip-version-check --quiet)

if ! compgen -G "$wheels/*.whl" > /dev/null; then
    "${pip[@]}" wheel --no-deps --wheel-dir "$wheels" "$source/packages/sinew-client" "$source/eval" "$source/perf" "$source"
fi
client=$(echo "$wheels"/sinew_vla_client-*.whl)
server=$(echo "$wheels"/sinew_vla-*.whl)
eval=$(echo "$wheels"/sinew_vla_eval-*.whl) # the built-in tasks, `sinew eval`
perf=$(echo "$wheels"/sinew_vla_perf-*.whl) # counts the memory of policies
install=("${pip[@]}" install ${constraints:+-c "$constraints"})

more=${EXTRAS:+,$EXTRAS}
case $role in
    client) "${pip[@]}" install "$client" ;; # its ranges are wide for old robots: no constraints
    onnx) "${install[@]}" "$client" "${server}[onnx$more]" ;;
    cpu | cuda)
        # First and alone: the rest could pull another build of it.
        "${install[@]}" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch
        "${install[@]}" "$client" "$eval" "$perf" "${server}[torch,onnx$more]"
        ;;
    jetson)
        # The system's torch must stay, so torch is named nowhere here.
        "${pip[@]}" install "$client" "${server}[onnx$more]"
        ;;
esac
[ -n "${WHEELS:-}" ] || rm -rf "$wheels"
