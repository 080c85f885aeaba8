"""Support engines that span several nodes. The ranks on each node form a part; the first part's process is the engine.

The remaining parts only start ranks, which receive the engine's calls over the network. vLLM runs its scheduler only on
the first node. All ranks connect to a store in the first part, which starts before them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from vllm import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from megarl.rollout.vllm.environment import ENDS_WITH_PARENT


def part_arguments(number: int, count: int, host: str, port: int) -> dict[str, Any]:
    """Return the vLLM engine arguments for the process of part `number` of `count`. All parts have the same number of
    ranks, which connect through the store at `host` and `port`."""
    return dict(nnodes=count, node_rank=number, master_addr=host, master_port=port, distributed_executor_backend="mp")


def set_rendezvous_address(node_address: str) -> None:
    """Make ranks started by this process use the given node address and connect to an existing store. By default, the
    first torch rank would create the store itself."""
    os.environ.update(VLLM_HOST_IP=node_address, TORCHELASTIC_USE_AGENT_STORE="True")


class PartRanks:
    """The running ranks in a part other than the first."""

    def __init__(self, arguments: Mapping[str, Any]):
        """`arguments` are the vLLM arguments for the engine and the part."""
        os.environ[ENDS_WITH_PARENT] = "1"
        # Defaults such as max_num_seqs depend on the usage context. Use that of LLM, because all parts must agree.
        config = EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS, headless=True)
        self._executor = MultiprocExecutor(config)
        self.died = threading.Event()
        """Set when a rank has died."""
        self._executor.register_failure_callback(self.died.set)
