#!/usr/bin/env bash
# Tests with other releases of Python, torch and transformers, in an environment of their own.
#   scripts/pytest_releases.sh PYTHON TORCH TRANSFORMERS [PYTEST ARGUMENTS]
#   scripts/pytest_releases.sh 3.12 2.11.0 5.17 tests/model
# Without a path: the tests of models, which a release of torch or transformers can break. Everything goes to build/releases.
# Where there is no CPU build of that torch, the one for CUDA and its libraries are fetched: 3 GB, 5 on disk.
# PYTHON_FOR_RELEASES names the interpreter where it is not found.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# -lt 3 ]; then
  sed -n '2,8s/^# \?//p' "$0" >&2
  exit 2
fi
version=$1 torch=$2 transformers=$3
shift 3
place=build/releases/python-$version-torch-$torch-transformers-$transformers
venv=$place/venv
wanted=${PYTHON_FOR_RELEASES:-python$version}

is_wanted() {
  "$1" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != sys.argv[1])' "$version" 2>/dev/null
}

python=
for candidate in "$wanted" "$HOME"/.pyenv/versions/"$version".*/bin/python"$version"; do
  if is_wanted "$candidate"; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  echo "pytest-releases: there is no Python $version, looked for $wanted on PATH and" \
    "in ~/.pyenv; install it with its headers, or name it in PYTHON_FOR_RELEASES" >&2
  exit 1
fi

pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet)
if [ ! -e "$venv/.complete" ]; then
  "$python" -m venv "$venv"
  "${pip[@]}" "torch==$torch+cpu" 2>/dev/null || "${pip[@]}" "torch==$torch"
  "${pip[@]}" "transformers==$transformers.*" \
    'scikit-build-core>=0.11' 'pybind11>=2.13' 'hatch-fancy-pypi-readme>=24' cmake ninja
  touch "$venv/.complete"
fi
PATH=$PWD/$venv/bin:$PATH "${pip[@]}" --no-build-isolation --config-settings=build-dir="$place/tree" \
  --config-settings=cmake.define.KVPAGER_SHIM=ON --config-settings=cmake.define.KVPAGER_CUDA=OFF '.[test]'

"$venv/bin/python" -c 'import platform, torch, transformers
print("Python", platform.python_version(), "torch", torch.__version__, "transformers", transformers.__version__)'

# Arguments of pytest that are no paths leave all tests of models.
for argument in "$@"; do
  if [ -e "${argument%%::*}" ]; then
    exec "$venv/bin/python" -m pytest "$@"
  fi
done
exec "$venv/bin/python" -m pytest "$@" tests/model
