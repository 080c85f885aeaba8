"""Run the soak of tests/cluster: more than fifty faults of all kinds on a Slurm cluster of three emulated nodes.

.venv/bin/python tools/benchmarks/soak.py --out tools/benchmarks/results/soak.json

Needs root and the packages of `make test-cluster`, and takes about an hour.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmark import run_benchmark

from tests.cluster.jobs import write_rewards
from tests.cluster.slurm import slurm
from tests.cluster.soak import FAULTS, Soak, plan
from tests.e2e.run import write_recipe


def soak(seed: int, number: int | None, vllm: bool) -> dict[str, Any]:
    """Run the soak, or its first faults, and return its figures. The folder with the run's logs is kept."""
    shared = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))  # the only folder in /tmp that emulated machines see
    print(f"seed {seed}, {sum(FAULTS.values())} faults, in {shared}", flush=True)
    write_recipe(shared)
    write_rewards(shared)
    (shared / "slow").unlink()
    with slurm(3, shared) as cluster:
        running = Soak(cluster, shared, seed, plan(seed)[:number], vllm)
        running.inject()
        return {"engines": "vLLM's engines" if vllm else "fake engines", **running.figures(seed)}


if __name__ == "__main__":
    run_benchmark(
        __doc__,
        lambda arguments, _: soak(arguments.seed, arguments.faults, arguments.vllm),
        ("--seed", dict(type=int, default=34, help="seed of the faults (%(default)s)")),
        ("--faults", dict(type=int, help="number of faults (default: all)")),
        ("--vllm", dict(action="store_true", help="use vLLM instead of the tests' fake engines")),
    )
