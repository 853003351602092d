#!/usr/bin/env bash
# The images' installation, step by step: each step is a layer. Run from the repository's root.
#
#   install.sh VENV torch      a venv with torch; TORCH_PIP_ARGS may name an index of CPU builds
#   install.sh VENV cuda       a venv with torch, its CUDA libraries and the kernel packages, hashes checked
#   install.sh VENV packages   what the project depends on, hashes checked
#   install.sh VENV project    the project itself, and a check that all requirements are met
#   install.sh VENV kernels    CUDA kernels of every line of kernels.list, compiled into `kernels` beside VENV; no GPU
set -euo pipefail
venv=${1:?install.sh VENV STEP} step=${2:?install.sh VENV STEP}
locks=$(dirname "${BASH_SOURCE[0]}")
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-cache-dir "$@"; }
# Locked: no dependency is resolved, and no file is taken whose hash is not listed.
locked() { pip install --no-deps --require-hashes --only-binary :all: --requirement "$1"; }

case $step in
torch)
    python3.11 -m venv "$venv"
    # shellcheck disable=SC2086  # a list of words
    pip install --no-deps torch==2.13.0 ${TORCH_PIP_ARGS:-}
    ;;
cuda)
    python3.11 -m venv "$venv"
    locked "$locks/requirements-cuda.txt"
    ;;
packages)
    locked "$locks/requirements.txt"
    ;;
project)
    pip install --no-deps --no-build-isolation .
    pip check
    ;;
kernels)
    while read -r deployment model experts options; do
        # shellcheck disable=SC2086  # a list of words
        "$venv/bin/flare-ray" kernels "deployments/$deployment.yaml" --config "$locks/geometries/$model" \
            --experts "$experts" $options --out "$(dirname "$venv")/kernels"
    done < <(grep -v '^#' "$locks/kernels.list")
    ;;
*)
    echo "install.sh: unknown step $step (torch, cuda, packages, project, kernels)" >&2
    exit 2
    ;;
esac
