#!/usr/bin/env bash
# Fetches the libraries of the server's page from npm, at these versions, into the package.
set -euo pipefail
cd "$(dirname "$0")/../python/kvpager/server/page/vendor"

libraries=(
  # package version integrity file licence
  "marked 18.2.1 sha512-ii4bxCTCqqwpT86XZWgJNs+ZnAIZksmLGYMViWA7PDIXYIeNo1x6cDdX3JOip9NM/cI6p8z57FxliACboTruMA== lib/marked.umd.js LICENSE"
  "dompurify 3.5.0 sha512-LYC0ZkE8P1V42JsRYTwMdme/2ET8SpOc5AA2eOFjP/IadvRd2fwiT4TVz5vkfy0XUx12aS2UaRkTnfVPNOv9vw== dist/purify.min.js LICENSE"
)

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for line in "${libraries[@]}"; do
  read -r name version integrity file licence <<<"$line"
  archive=$(npm pack --silent --pack-destination "$folder" "$name@$version")
  found=sha512-$(openssl dgst -sha512 -binary "$folder/$archive" | base64 -w0)
  if [ "$found" != "$integrity" ]; then
    echo "$name $version has the digest $found; expected $integrity" >&2
    exit 1
  fi
  # Without the line that names a source map, which is not there.
  tar -xzOf "$folder/$archive" "package/$file" | sed '/^\/\/# sourceMappingURL=/d' >"$name.js"
  tar -xzOf "$folder/$archive" "package/$licence" >"$name.LICENSE"
done
