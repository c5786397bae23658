#!/usr/bin/env bash
# Tests of kvpager.connectors.lmcache and .sglang, in environments in build/caches that see this one's packages.
#   scripts/lmcache_sglang_tests.sh [PYTEST ARGUMENTS]
# LMCache is installed without its GPU packages; of SGLang, which has no build for a CPU, the wheel is read and partly imported.
set -euo pipefail
cd "$(dirname "$0")/.."
place=$PWD/build/caches sglang=0.5.23 lmcache=(0.5.6 0.5.7rc2)
python=$PWD/.venv/bin/python
tests=$PWD/tests/connectors
export PIP_DISABLE_PIP_VERSION_CHECK=1
mkdir -p "$place"

# environment NAME PACKAGE PACKAGES...: makes it unless it is there; PACKAGE without what it depends on.
environment() {
  local venv=$place/$1
  if [ ! -e "$venv/.complete" ]; then
    "$python" -m venv "$venv"
    # With the .pth files there, as that of an editable install.
    "$python" -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
      > "$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/outer.pth"
    "$venv/bin/python" -m pip install --quiet "${@:3}"
    [ -z "$2" ] || "$venv/bin/python" -m pip install --quiet --no-deps "$2"
    touch "$venv/.complete"
  fi
}

if [ ! -e "$place/sources/sglang" ]; then
  "$python" -m pip download --quiet --no-deps --dest "$place" "sglang==$sglang"
  "$python" - "$place"/sglang-"$sglang"-*.whl "$place/sources" <<'EOF'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if name.endswith(".py")])
EOF
  rm "$place"/sglang-"$sglang"-*.whl
fi

status=0
for version in "${lmcache[@]}"; do
  environment "lmcache-$version" "lmcache==$version" numba aiofiles aiohttp awscrt cachetools grpcio msgspec nvtx \
    opentelemetry-exporter-prometheus py-cpuinfo pyzmq redis
  "$place/lmcache-$version/bin/python" -m pytest -W ignore -m "" "$tests"/test_lmcache*.py "$@" || status=1
done
environment sglang "" orjson pybase64 triton msgspec pyzmq ipython aiohttp
KVPAGER_SGLANG_SOURCES=$place/sources "$python" -m pytest -m "" "$tests"/test_sglang.py "$tests"/test_sglang_signatures.py "$@" \
  || status=1
PYTHONPATH=$place/sources "$place/sglang/bin/python" -m pytest -W ignore -m "" "$tests"/test_sglang_factory.py "$@" || status=1
exit $status
