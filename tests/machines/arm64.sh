#!/usr/bin/env bash
# Debian's Python for 64-bit Arm with mars-export and what it needs, unpacked in build/arm64; build/arm64/python CPU ...
# runs it on that processor of qemu-aarch64.
#   arm64.sh PYTHON    PYTHON has pip
# Needs the kernels' wheel for Arm (`make wheels`), root, apt (debootstrap, qemu-user) and a Python package index. What programs see as /proc/cpuinfo is a
# Cortex-A72, since qemu-user would pass the host's through.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
arm=$root/build/arm64

command -v debootstrap >/dev/null || {
    apt-get update --quiet=2
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 --no-install-recommends debootstrap >/dev/null
}
if [ ! -x "$arm/usr/bin/python3.11" ]; then
    rm -rf "$arm"
    debootstrap --foreign --arch=arm64 --variant=minbase --include=python3,libstdc++6,libgomp1 bookworm "$arm" >/dev/null
    for package in "$arm"/var/cache/apt/archives/*.deb; do dpkg -x "$package" "$arm"; done
fi
mkdir -p "$arm/proc"
for core in 0 1; do
    printf '%s\t: %s\n' processor "$core" Features 'fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid' 'CPU implementer' 0x41 \
        'CPU architecture' 8 'CPU variant' 0x0 'CPU part' 0xd08 'CPU revision' 3
    echo
done >"$arm/proc/cpuinfo"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps "$root" -w "$scratch"
platforms=(--platform manylinux2014_aarch64)
for glibc in 17 26 27 28 31 34; do platforms+=(--platform "manylinux_2_${glibc}_aarch64"); done
rm -rf "$arm/opt/mars"
"$python" -m pip install --quiet --disable-pip-version-check --no-warn-conflicts "${platforms[@]}" --python-version 3.11 --only-binary=:all: \
    --find-links "$root/dist" --target "$arm/opt/mars" "$scratch"/mars_export-*.whl

cat >"$arm/python" <<RUN
#!/usr/bin/env bash
cpu=\$1
shift
exec qemu-aarch64 -cpu "\$cpu" -L "$arm" -E "PYTHONPATH=$arm/opt/mars" -E "PYTHONHOME=$arm/usr" "$arm/usr/bin/python3.11" "\$@"
RUN
chmod +x "$arm/python"
