"""Tensors sent between pipeline stages stay unchanged in memory until the send completes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import p2p_communication

from megarl.config.schema import Config
from tests.forked import run_ranks
from tests.parity import config_of, random_groups, train
from tests.tiny_model import SHARDED_VOCAB, write_tiny_llama


@dataclasses.dataclass
class Send:
    """A send in flight. gloo may read the tensor's memory at any time until wait() returns."""

    work: dist.Work
    tensor: torch.Tensor
    content: torch.Tensor
    complete: bool = False

    def wait(self) -> None:
        assert torch.equal(self.tensor, self.content), "the tensor was released or overwritten while it was being sent"
        self.work.wait()
        self.complete = True


def train_and_watch(store, rank: int, config: Config, folder: Path) -> int:
    """Train two updates and return the number of asynchronous sends that were checked."""
    sends: list[Send] = []
    inner = p2p_communication._p2p_ops

    def watched(**tensors) -> dict[str, dist.Work | Send]:
        contents = {end: tensors[f"tensor_{end}"] for end in ("send_next", "send_prev")}
        copies = {end: tensor.detach().clone() for end, tensor in contents.items() if tensor is not None}
        works = inner(**tensors)
        for end, content in copies.items():
            works[end] = Send(works[end], contents[end], content)
            sends.append(works[end])
        return works

    p2p_communication._p2p_ops = watched
    train(store, rank, config, folder, [random_groups(0, SHARDED_VOCAB), random_groups(1, SHARDED_VOCAB)])
    for send in sends:
        # Megatron does not wait for the last send, because receiving the gradient implies its completion.
        if not send.complete:
            send.wait()
    return len(sends)


@pytest.mark.parametrize("layout", ["pp: 2, vpp: 2", "pp: 2, vpp: 2, tp: 2, sequence_parallel: true"])
def test_virtual_stages_keep_tensors_until_they_are_sent(tmp_path, layout):
    folder = write_tiny_llama(tmp_path, num_heads=4, num_kv_heads=2, num_layers=4, tied=False, vocab_size=SHARDED_VOCAB)
    config = config_of(folder, f"actor.layout={{{layout}}}")
    assert min(run_ranks(config.actor.layout.world_size, train_and_watch, config, folder)) > 0
