"""Emulated machines of a cluster, in namespaces of one machine.

Each has its own network, host name, processes, /dev/shm and /tmp, and a cable to a switch. Other files are shared, as
on a cluster's file system. Requires root, iproute2 and util-linux.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.timing import POLL_S, WAIT_S

NETWORK = "10.77.{}"

BOOT = """
set -e
mount --make-rprivate /
mkdir -p "$KEPT"
mount --bind "$SHARED" "$KEPT"
mount -t tmpfs -o size=8g tmpfs /tmp
mount -t tmpfs -o size=4g tmpfs /dev/shm
mkdir -p "$SHARED"
mount --move "$KEPT" "$SHARED"
mount --bind "$SHARED/.hosts" /etc/hosts
hostname "$NAME"
ip link set lo up
touch "$SHARED/.booted-$NAME"
sleep infinity &
wait  # also reaps orphans
"""


class Machine:
    """An emulated machine. Its processes see only each other."""

    def __init__(self, name: str, address: str, number: int, network: str, shared: Path):
        """Boot the machine. `shared` is a folder in /tmp that all machines see."""
        self.name, self.address, self.network, self._shared = name, address, network, shared
        self._outside, self._inside = f"{network}n{number}", f"{network}i{number}"
        self.boot()

    def boot(self) -> None:
        """Boot the machine, for the first time or after `crash`."""
        environment = {
            **os.environ,
            "NAME": self.name,
            "SHARED": str(self._shared),
            "KEPT": f"/run/{self.network}-{self.name}",
        }
        namespaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        booted = self._shared / f".booted-{self.name}"
        booted.unlink(missing_ok=True)
        self._init = subprocess.Popen(["unshare", *namespaces, "bash", "-c", BOOT], env=environment)
        deadline = time.monotonic() + WAIT_S
        while not booted.exists():
            assert self._init.poll() is None and time.monotonic() < deadline, f"{self.name} did not boot"
            time.sleep(POLL_S)
        [child] = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text().split()
        self._pid = child
        run("ip", "link", "add", self._outside, "type", "veth", "peer", "name", self._inside, "netns", child)
        run("ip", "link", "set", self._outside, "master", self.network, "up")
        run(*self._enter, "ip", "link", "set", self._inside, "name", "eth0")
        run(*self._enter, "ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        run(*self._enter, "ip", "link", "set", "eth0", "up")

    @property
    def _enter(self) -> list[str]:
        return ["nsenter", "--target", self._pid, "--net", "--uts", "--ipc", "--mount", "--pid", "--"]

    def start(self, command: Sequence[str], output: Path, cwd: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command on this machine and write its output to a file."""
        words = [*self._enter, "env", "-C", str(cwd), *command]
        with output.open("wb") as stream:
            return subprocess.Popen(
                words,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, *command: str) -> str:
        """Run a command on this machine and return its stdout."""
        return run(*self._enter, *command)

    def processes(self) -> list[str]:
        """Return the command lines of all processes except those of the emulation."""
        listed = [line.split(maxsplit=1) for line in self.run("ps", "-wweo", "pid=,args=").splitlines()]
        excluded = ("sleep infinity", "ps -wweo pid=,args=")
        return [words for pid, words in listed if pid != "1" and words not in excluded]

    def files(self) -> list[str]:
        """List /tmp and /dev/shm, except the shared folder and torch's per-user cache."""
        kept = (
            f"/tmp/{self._shared.parts[2]}",
            "/tmp/torchinductor_*",
        )
        inside = ["-mindepth", "1", "-maxdepth", "1", *(word for path in kept for word in ("-not", "-path", path))]
        return run(*self._enter, "find", "/tmp", "/dev/shm", *inside).splitlines()

    def received_bytes(self) -> int:
        """Return the number of bytes received over the cable."""
        counted = json.loads(run("ip", "-json", "-statistics", "link", "show", self._outside))
        return counted[0]["stats64"]["tx"]["bytes"]  # sent by the cable's outer end

    def cut(self) -> None:
        """Unplug the cable."""
        run("ip", "link", "set", self._outside, "down")

    def mend(self) -> None:
        run("ip", "link", "set", self._outside, "up")

    @property
    def is_up(self) -> bool:
        return self._init.poll() is None

    def crash(self) -> None:
        """Kill the machine with all of its processes, and remove its cable."""
        self._init.kill()
        self._init.wait()
        subprocess.run(["ip", "link", "delete", self._outside], capture_output=True)

    def stop(self) -> None:
        if self._init.poll() is None:
            self.crash()


class Machines:
    """Emulated machines and the switch between them, as a context manager."""

    def __init__(self, count: int, shared: Path):
        """Boot `count` machines. All of them see `shared`, a folder in /tmp, at the same path."""
        assert os.geteuid() == 0, "only root can create namespaces. Fix: run make test-cluster as root"
        self._network = f"m{os.getpid() % 100000}"
        subnet = NETWORK.format(os.getpid() % 250)
        addresses = [f"{subnet}.{number + 1}" for number in range(count)]
        names = [f"n{number}" for number in range(count)]
        hosts = ["127.0.0.1 localhost", *map(" ".join, zip(addresses, names, strict=True))]
        (shared / ".hosts").write_text("\n".join(hosts) + "\n")
        run("ip", "link", "add", self._network, "type", "bridge")
        run("ip", "link", "set", self._network, "up")
        pairs = enumerate(zip(names, addresses, strict=True))
        self.all = [Machine(name, address, i, self._network, shared) for i, (name, address) in pairs]

    def __enter__(self) -> list[Machine]:
        return self.all

    def __exit__(self, *_: object) -> None:
        for machine in self.all:
            machine.stop()
        run("ip", "link", "delete", self._network)


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
