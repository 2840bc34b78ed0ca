#!/bin/sh
# Install the system packages that tests use, as root with apt-get; elsewhere do nothing.
# nats-server: the relay beyond one machine. iproute2, nftables: hosts as network namespaces, NAT.
# chromium, fonts-dejavu-core: pages in a browser. prometheus: promtool, which checks metrics and alerts.
packages="chromium fonts-dejavu-core iproute2 nats-server nftables prometheus"
missing=""
for package in $packages; do
    dpkg -s "$package" >/dev/null 2>&1 || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "not installed, their tests will skip:$missing"
    exit 0
fi
apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
