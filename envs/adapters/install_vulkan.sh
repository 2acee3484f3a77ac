#!/usr/bin/env bash
# Install Mesa's software Vulkan device (lavapipe, Mesa 25 or newer), which ManiSkill needs on a machine without a GPU.
# For Debian 12 or newer and Ubuntu 25.04 or newer, as root. Does nothing where a Vulkan driver of that age is there.
set -euo pipefail

new_enough() {
    local version
    version=$(dpkg-query --show --showformat='${Version}' mesa-vulkan-drivers 2>/dev/null) || return 1
    dpkg --compare-versions "$version" ge 25 && dpkg-query --show libvulkan1 >/dev/null 2>&1
}

if new_enough; then
    exit 0
fi
. /etc/os-release
suite=()
if [ "${VERSION_CODENAME:-}" = bookworm ]; then # its own Mesa 22 has no device that ManiSkill accepts
    mirror=$(apt-get indextargets --format '$(CODENAME) $(REPO_URI)' | awk '$1 == "bookworm" { print $2; exit }')
    echo "deb ${mirror:?no mirror of Debian is configured} bookworm-backports main" \
        >/etc/apt/sources.list.d/bookworm-backports.list
    suite=(-t bookworm-backports)
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${suite[@]}" mesa-vulkan-drivers libvulkan1
new_enough || { echo 'this system offers no Mesa 25: ManiSkill finds no Vulkan device' >&2; exit 1; }
