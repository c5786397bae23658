#!/usr/bin/env bash
# Prints the path of an nvcc: of PATH, of /usr/local/cuda, or of packages it puts into FOLDER.
#   scripts/fetch_nvcc.sh FOLDER [PYTHON]
# Compiling needs no GPU and no driver. The packages are about 105 MB to fetch, 270 MB on disk.
set -euo pipefail
folder=${1:?folder to install to}
python=${2:-python3}

if command -v nvcc; then exit 0; fi
for nvcc in "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" "$folder"/nvidia/cu13/bin/nvcc; do
  if [ -x "$nvcc" ]; then
    echo "$nvcc"
    exit 0
  fi
done

# One release line for all: a compiler and headers of different ones do not go together.
release=13.0
packages=()
for name in nvcc crt runtime cccl; do packages+=("nvidia-cuda-$name==$release.*"); done
packages+=("nvidia-nvvm==$release.*")
"$python" -m pip --disable-pip-version-check install --quiet --no-deps --upgrade \
  --target "$folder" "${packages[@]}" >&2
# nvcc looks for its libraries in lib64.
ln -sfn lib "$folder/nvidia/cu13/lib64"
echo "$folder/nvidia/cu13/bin/nvcc"
