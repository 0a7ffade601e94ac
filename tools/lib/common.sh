# shellcheck shell=bash disable=SC2034
# Shared by the shell programs of tools/ and .ci/ (sourced, never run): where the tree is, how to speak, how to fail.
# Sets ROOT to the top of the source tree. Every function prints to stderr, so that stdout stays data.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)

say() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
}

# die CODE MESSAGE...: every line of a failure says what was wrong and what to change.
die() {
    local code=$1
    shift
    say "$@"
    exit "$code"
}

# need_value FLAG "$#": for flags that take a value.
need_value() {
    if [ "$2" -lt 2 ]; then
        die 2 "$1 needs a value; --help shows what it takes"
    fi
}
