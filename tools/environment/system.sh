#!/usr/bin/env bash
# Installs Debian packages for missing commands: system.sh COMMAND:PACKAGE …
set -euo pipefail
exec 9< "$0"
flock 9  # targets of a parallel make may run this script concurrently
missing=()
for pair in "$@"; do
  command -v "${pair%%:*}" > /dev/null || missing+=("${pair##*:}")
done
if ((${#missing[@]} == 0)); then exit 0; fi
if [[ $(id -u) != 0 ]] || ! command -v apt-get > /dev/null; then
  echo "error: missing packages: ${missing[*]}. Fix: install them, or rerun this command as root on Debian" >&2
  exit 1
fi
apt-get update --quiet=2
DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends "${missing[@]}"
