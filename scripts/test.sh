#!/usr/bin/env bash
# Run the tests in three parts: those that bear company on TEST_WORKERS cores at once; those that kill, stop and cut off
# processes, in the same way; and those that need the machine for themselves.
# A test that failed runs once more at the end, with nothing beside it: what two engines on the same two cores took from each
# other is not its fault. What fails again fails the run; what passes then
# is told above as failed, and worth a look.
# Arguments go to pytest, for every part: scripts/test.sh -k ring
set -uo pipefail
cd "$(dirname "$0")/.."
workers=${TEST_WORKERS:-2}
found=5 # what pytest says where nothing was selected
failed=0
broken=0 # more than tests that failed: pytest was interrupted, misused or broke

part() {
    local code=0
    .venv/bin/python -m pytest --part "$@" || code=$?
    case $code in
        0) found=0 ;;
        5) ;;
        1) found=0 failed=1 ;;
        *) broken=$code ;;
    esac
}

# What pytest remembers of earlier runs is not of this one.
rm -f .pytest_cache/v/cache/lastfailed
part together -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
part faults -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
part alone "$@"

if [ "$broken" -ne 0 ]; then exit "$broken"; fi
if [ "$failed" -ne 0 ]; then
    printf '\nOnce more, one after the other, what failed:\n'
    exec .venv/bin/python -m pytest --last-failed --last-failed-no-failures none --maxfail 10 "$@"
fi
exit "$found"
