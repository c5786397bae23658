#!/bin/sh
# Builds the fuzz target with clang's libFuzzer, ASan and UBSan, and runs it from the corpus.
#
#   tests/fuzz/run.sh SECONDS [FOLDER]    fuzzes; finds go to FOLDER/corpus and FOLDER/crashes
#   tests/fuzz/run.sh --merge [FOLDER]    FOLDER/merged: as few inputs as reach all that both reach
#   tests/fuzz/run.sh --coverage [FOLDER] lines of csrc/snapshot/ that the committed corpus reaches
set -eu
cd "$(dirname "$0")/../.."
mode=$1
work=${2:-build/fuzz}
mkdir -p "$work/corpus" "$work/crashes" "$work/merged"
work=$(cd "$work" && pwd)

build() { # OUTPUT COMPILER FLAGS...
  output=$1
  shift
  "$@" -std=c++17 -g -pthread -Icsrc -Icsrc/include \
    tests/fuzz/snapshot_fuzz.cc csrc/snapshot/*.cc csrc/kernels/layout.cc csrc/hash/xxh3.cc csrc/memory/fault.cc -o "$output"
}

if [ "$mode" = --coverage ]; then
  rm -f "$work"/*.gcda "$work"/*.gcno
  build "$work/cover" "${CXX:-g++}" -O0 --coverage -DKVPAGER_FUZZ_MAIN
  "$work/cover" tests/fuzz/corpus
  gcov --no-output --relative-only "$work"/cover-*.gcda | grep -A1 "'csrc/snapshot/.*cc'"
  exit
fi

clang=${FUZZ_CXX:-$(command -v clang++-19 || command -v clang++ || true)}
if [ -z "$clang" ]; then
  echo "no clang++, hence no libFuzzer: skipped"
  exit
fi
# libFuzzer ends without leaving main, so what it keeps in files is removed here.
base=/dev/shm
[ -w $base ] || base=${TMPDIR:-/tmp}
TMPDIR=$(mktemp -d "$base/kvpager_fuzz_XXXXXX")
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
build "$work/snapshot_fuzz" "$clang" -O1 -fsanitize=fuzzer,address,undefined \
  -fno-sanitize-recover=undefined
if [ "$mode" = --merge ]; then
  rm -f "$work"/merged/*
  "$work/snapshot_fuzz" -set_cover_merge=1 -max_len=24000 "$work/merged" tests/fuzz/corpus \
    "$work/corpus"
  exit
fi
# An input has at most 24000 bytes; the largest buffer that may be taken for one is that of verify.
"$work/snapshot_fuzz" -max_total_time="$mode" -max_len=24000 -malloc_limit_mb=12 \
  -rss_limit_mb=2048 -timeout=20 -artifact_prefix="$work/crashes/" -print_final_stats=1 \
  "$work/corpus" tests/fuzz/corpus
