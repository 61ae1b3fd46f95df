# Sourced by setup.sh and setup_aarch64.sh: packages by their names, which Debian 12 and 13 and Ubuntu 22.04 and 24.04 share.

# need_packages WHAT PACKAGE...: install those that are missing. Without root, or without apt, say which `WHAT` needs and exit with 3.
need_packages() {
    local what=$1 package missing=()
    shift
    if ! command -v dpkg-query >/dev/null; then
        echo "$what needs (names of Debian): $*; this script only knows apt (docs/cpp.md)" >&2
        exit 3
    fi
    for package in "$@"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
    if ((${#missing[@]} == 0)); then return; fi
    if [ "$(id -u)" != 0 ]; then
        echo "$what needs: sudo apt-get install ${missing[*]}" >&2
        exit 3
    fi
    apt-get update --quiet=2
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 --no-install-recommends "${missing[@]}" >/dev/null
}
