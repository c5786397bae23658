#!/usr/bin/env bash
# Sees to it that the C++ tests find doctest: of the system, or of Debian's package unpacked in FOLDER,
# where tests/cpp/CMakeLists.txt looks for build/doctest.
#   scripts/fetch_doctest.sh FOLDER
# Needs no root: on Debian and Ubuntu the package is fetched with apt and only unpacked.
set -euo pipefail
folder=${1:?folder to unpack to}

if [ -f "$folder/usr/include/doctest/doctest.h" ]; then exit 0; fi
if echo '#include <doctest/doctest.h>' | "${CXX:-c++}" -E -x c++ - >/dev/null 2>&1; then exit 0; fi
if [ -n "${CMAKE_PREFIX_PATH:-}" ]; then exit 0; fi  # CMake looks there
if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
  echo "doctest is not installed and there is no apt to fetch it with: install it (Homebrew and" \
    "conda-forge: doctest; Fedora: doctest-devel)" >&2
  exit 1
fi

mkdir -p "$folder/lists/partial" "$folder/archives/partial"
cd "$folder"
# Lists of packages of its own where the system's are empty, as in a fresh container.
options=()
if ! apt-cache show doctest-dev >/dev/null 2>&1; then
  options=(-o "Dir::State::lists=$PWD/lists" -o "Dir::Cache=$PWD" -o APT::Sandbox::User=root
    -o Debug::NoLocking=1)
  apt-get "${options[@]}" -qq update >&2
fi
apt-get "${options[@]}" -qq -o APT::Sandbox::User=root download doctest-dev >&2
dpkg-deb --extract doctest-dev_*.deb .
rm -rf doctest-dev_*.deb usr/share lists archives ./*.bin
