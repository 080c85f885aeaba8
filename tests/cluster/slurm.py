"""A real Slurm cluster on emulated machines: munge and the controller run here, slurmd on each of the machines."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.machines import Machine, Machines
from tests.timing import ASK_S, NODE_DOWN_S, START_S, WAIT_S

CONF = """
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also the delay of a job that goes back into the queue
AuthInfo=socket={root}/munge.sock,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=5
ReturnToService=2
KillWait=240
MinJobAge=600
SlurmdTimeout={down_s}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=main Nodes=ALL MaxTime=60 PriorityTier=1 PreemptMode=REQUEUE GraceTime=240 Default=YES
PartitionName=urgent Nodes=ALL MaxTime=60 PriorityTier=10 PreemptMode=OFF
"""


class Slurm:
    """A Slurm cluster. Its commands run on this machine, which acts as the login node."""

    def __init__(self, machines: list[Machine], root: Path, environment: dict[str, str]):
        self.machines, self._root, self.environment = machines, root, environment

    def boot(self, machine: Machine) -> None:
        """Start slurmd on a machine."""
        output = self._root / f"{machine.name}.out"
        machine.start(["slurmd", "-D", "-N", machine.name], output, Path("/"), **self.environment)

    def run(self, *command: str, **options: object) -> subprocess.CompletedProcess[str]:
        """Run a command as a user of the cluster."""
        environment = {**os.environ, **self.environment}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S, **options)

    def ask(self, *command: str) -> str:
        done = self.run(*command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return a job's fields under Slurm's names, such as JobState."""
        words = self.ask("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_state(self, number: str, *states: str, seconds: float) -> dict[str, str]:
        deadline = time.monotonic() + seconds
        while (job := self.job(number))["JobState"] not in states:
            assert time.monotonic() < deadline, job
            time.sleep(ASK_S)
        return job

    def wait_for_nodes(self, seconds: float) -> None:
        """Wait until all nodes are idle."""
        deadline = time.monotonic() + seconds
        while self._idle() < len(self.machines):
            assert time.monotonic() < deadline, self.ask("sinfo", "-N", "-l") + self.ask("sinfo", "-R")
            time.sleep(ASK_S)

    def _idle(self) -> int:
        done = self.run("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N")
        return len(done.stdout.split())


@contextmanager
def slurm(count: int, shared: Path) -> Iterator[Slurm]:
    """Start a Slurm cluster on `count` machines, which share the folder `shared`."""
    root = shared / "slurm"
    for folder in (root, root / "state", *(root / f"spool.n{i}" for i in range(count))):
        folder.mkdir(mode=0o755)
    with Machines(count, shared) as machines:
        address, host = machines[0].address.rsplit(".", 1)[0] + ".254", socket.gethostname().partition(".")[0]
        subprocess.run(["ip", "address", "add", f"{address}/24", "dev", machines[0].network], check=True)
        with (shared / ".hosts").open("a") as hosts:
            hosts.write(f"{address} {host}\n")
        environment = {"SLURM_CONF": str(root / "slurm.conf")}
        _write_conf(root, host, address, machines)
        slurm = Slurm(machines, root, environment)
        daemons = [subprocess.Popen(_munge_command(root))]
        try:
            while not (root / "munge.sock").exists():
                time.sleep(ASK_S)
            daemons.append(subprocess.Popen(["slurmctld", "-D", "-c"], env={**os.environ, **environment}))
            for machine in machines:
                slurm.boot(machine)
            slurm.wait_for_nodes(START_S)
            yield slurm
        finally:
            slurm.run("scancel", "--user=root")
            time.sleep(1)
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait()


def _write_conf(root: Path, host: str, address: str, machines: list[Machine]) -> None:
    with socket.socket() as prober:
        prober.bind((address, 0))
        port = prober.getsockname()[1]
    lines = [CONF.format(host=host, address=address, port=port, root=root, down_s=NODE_DOWN_S)]
    lines += [f"NodeName={m.name} NodeAddr={m.address} CPUs=4 RealMemory=8000 State=UNKNOWN" for m in machines]
    (root / "slurm.conf").write_text("\n".join(lines) + "\n")
    (root / "cgroup.conf").write_text("CgroupAutomount=no\n")


def _munge_command(root: Path) -> list[str]:
    folder = root / "munge"
    folder.mkdir(mode=0o700)
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    names = ("pid", "log", "seed")
    files = [f"--{name}-file={folder / name}" for name in names]
    return [
        shutil.which("munged"),
        "--foreground",
        "--force",
        f"--key-file={key}",
        f"--socket={root}/munge.sock",
        *files,
    ]
