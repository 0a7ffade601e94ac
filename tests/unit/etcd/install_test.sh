#!/bin/sh
# install_test.sh BUILD EXAMPLE.c CC: installs libetcd-c from BUILD, builds the example with pkg-config alone, and runs it.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cmake --install "$1" --component libetcd-c --prefix "$folder/usr" >"$folder/log" || {
  cat "$folder/log"
  exit 1
}
PKG_CONFIG_PATH=$(dirname "$(find "$folder/usr" -name libetcd-c.pc)")
export PKG_CONFIG_PATH
# shellcheck disable=SC2046 # the flags are words
"$3" -std=gnu17 -o "$folder/example" "$2" $(pkg-config --cflags --libs libetcd-c)
status=0
"$folder/example" nowhere 2>"$folder/log" || status=$?
cat "$folder/log"
test "$status" -eq 1
grep -q "etcd endpoint 'nowhere'" "$folder/log"
