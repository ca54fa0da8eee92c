#!/bin/sh
# Runs test programs, each of which ends with a line "N passed, N failed", and ends with the line of all of them together.
# A program that ends without such a line, or by a signal, counts as one failure.
# What tide sets for itself: on a busy machine spinning threads keep those they wait for from their cores.
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-5000}"
passed=0
failed=0
for program in "$@"; do
    echo "== $program"
    output=$("$program" 2>&1)
    status=$?
    printf '%s\n' "$output" | tail -n 40
    line=$(printf '%s\n' "$output" | tail -n 1)
    case $line in
        *" passed, "*" failed") passed=$((passed + ${line%% *})); line=${line#*, }; count=${line%% *} ;;
        *) count=1 ;;
    esac
    [ "$count" -eq 0 ] && [ "$status" -ne 0 ] && count=1
    failed=$((failed + count))
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
