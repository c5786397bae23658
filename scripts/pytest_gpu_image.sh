#!/usr/bin/env bash
# Model tests with what GPU images have, without a GPU: Python 3.12, torch 2.11, transformers 5.17.
#   scripts/pytest_gpu_image.sh [PYTEST ARGUMENTS]
# Everything goes to build/gpu-image. Where there is no CPU build of that torch, the one for CUDA and its
# libraries are fetched: 3 GB, 5 on disk. PYTHON312 names the interpreter where it is not found.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=build/gpu-image/venv

is_312() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; }

python=
for candidate in "${PYTHON312:-python3.12}" "$HOME"/.pyenv/versions/3.12.*/bin/python3.12; do
  if is_312 "$candidate"; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  echo "pytest-gpu-image: there is no Python 3.12, looked for ${PYTHON312:-python3.12} on PATH and" \
    "in ~/.pyenv; install it with its headers, or name it in PYTHON312" >&2
  exit 1
fi

pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet)
if [ ! -e "$venv/.complete" ]; then
  "$python" -m venv "$venv"
  "${pip[@]}" 'torch==2.11.0+cpu' 2>/dev/null || "${pip[@]}" 'torch==2.11.0'
  "${pip[@]}" 'transformers==5.17.*' blake3 xxhash rich matplotlib safetensors accelerate peft \
    hypothesis 'pytest>=8' 'scikit-build-core>=0.11' 'pybind11>=2.13' 'hatch-fancy-pypi-readme>=24' cmake ninja
  touch "$venv/.complete"
fi
PATH=$PWD/$venv/bin:$PATH "${pip[@]}" --no-build-isolation --no-deps --force-reinstall \
  --config-settings=build-dir=build/gpu-image/tree \
  --config-settings=cmake.define.KVPAGER_SHIM=ON --config-settings=cmake.define.KVPAGER_CUDA=OFF .

"$venv/bin/python" -c 'import platform, torch, transformers
print("Python", platform.python_version(), "torch", torch.__version__, "transformers", transformers.__version__)'

# The promise, devices, transformers' own caches, row counts: what a release of torch or transformers can break.
tests=()
for name in pure_function_of_tokens generation device_engine device_simulated transformers_cache \
  own_attention stock_transformers row_counts; do
  tests+=("tests/model/test_$name.py")
done
exec "$venv/bin/python" -m pytest -q "$@" "${tests[@]}"
