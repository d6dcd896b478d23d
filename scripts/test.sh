#!/usr/bin/env bash
# Run the tests in three parts: those that bear company on TEST_WORKERS cores at once; those that kill, stop and cut off
# processes, in the same way; and those that need the machine for themselves.
# Arguments go to pytest, for every part: scripts/test.sh -k ring
set -uo pipefail
cd "$(dirname "$0")/.."
workers=${TEST_WORKERS:-2}
found=5 # what pytest says where nothing was selected
failed=0

part() {
    local code=0
    .venv/bin/python -m pytest --part "$@" || code=$?
    case $code in
        0) found=0 ;;
        5) ;;
        *) failed=$code ;;
    esac
}

part together -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
part faults -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
part alone "$@"

if [ "$failed" -ne 0 ]; then exit "$failed"; fi
exit "$found"
