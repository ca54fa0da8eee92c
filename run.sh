#!/bin/sh
# Installs what is missing (through apt, where it may), builds tide and starts the chat; without a terminal it prints a
# demonstration instead.
#
#     ./run.sh            talk to the shipped model
#     ./run.sh test       run the tests
set -eu
cd "$(dirname "$0")"

packages="gcc make libc6-dev libcjson-dev libpcre2-dev libutf8proc-dev libedit-dev libstb-dev libxxhash-dev python3 xz-utils"

missing=""
for package in $packages; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing="$missing $package"
done

install_missing() {
    $1 env DEBIAN_FRONTEND=noninteractive apt-get update -q >&2
    # shellcheck disable=SC2086  # a list of names
    $1 env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing >&2
}

if [ -n "$missing" ]; then
    if ! command -v apt-get >/dev/null; then
        echo "run.sh: this is not a Debian system; building with what is there. tide needs the equivalents of:$missing" >&2
    elif [ "$(id -u)" -eq 0 ]; then
        install_missing ""
    elif sudo -n true 2>/dev/null; then
        install_missing sudo
    else
        echo "run.sh: these packages are missing and this user may not install them; as root:" >&2
        echo "    apt-get install$missing" >&2
        exit 1
    fi
fi

make -s tide

case "${1:-}" in
"") ;;
test) exec make -s test ;;
*) echo "run.sh: found \"$1\", wanted nothing or \"test\"" >&2; exit 2 ;;
esac

if [ -t 0 ] && [ -t 1 ]; then exec ./tide chat; fi
for question in "What is 47 + 38?" "The code of Peter is 4711. The code of Mary is 90210. What is the code of Mary?" "Tell me a story about Emma."; do
    printf '> %s\n' "$question"
    ./tide generate --quiet --chat --seed 1 -n 120 -p "$question"
done
