"""An engine over several nodes: the ranks on each are a part of it, and the first part's process is the engine.

The others only start theirs (a node after the first runs no scheduler of vLLM's), which then take the engine's calls
over the network. All ranks meet at a store of the first part's that is open before any of them starts.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from megarl.rollout.vllm.environment import ENDS_WITH_PARENT


@dataclass(frozen=True, slots=True)
class Part:
    """One of the parts of an engine, which all have as many ranks.

    host, port   of the store where the ranks meet
    """

    number: int
    count: int
    host: str
    port: int

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of vLLM by which its ranks are those of this part."""
        return dict(
            nnodes=self.count,
            node_rank=self.number,
            master_addr=self.host,
            master_port=self.port,
            distributed_executor_backend="mp",
        )


def meet_over(own_address: str) -> None:
    """Makes ranks that this process starts meet over this address of the node, at a store that they find open: torch's
    first rank would open one itself."""
    os.environ.update(VLLM_HOST_IP=own_address, TORCHELASTIC_USE_AGENT_STORE="True")


class PartRanks:
    """The ranks of a part after the first, started."""

    def __init__(self, arguments: Mapping[str, Any]):
        """arguments: those of the engine and of the part."""
        os.environ[ENDS_WITH_PARENT] = "1"
        # With the context that LLM gives: defaults such as max_num_seqs follow from it, and are those of all parts.
        config = EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS, headless=True)
        self._executor = MultiprocExecutor(config)
        self.died = threading.Event()
        """Set when one of them has died."""
        self._executor.register_failure_callback(self.died.set)
