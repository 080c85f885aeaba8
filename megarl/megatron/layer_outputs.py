"""Layer outputs of the trainer's model for one sequence, computed on a single rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]  # documented, but not in __all__

from megarl.config.schema import Config
from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample, SampleRef
from megarl.data.local_batch import LocalBatch
from megarl.megatron.routes import model_of
from megarl.megatron.workers.model import ModelWorker


class ForwardOnlyActor(ModelWorker):
    """The actor's model, for forward passes only."""

    role = "actor"

    @property
    def temperature(self) -> float:
        return 1.0


def layer_outputs(config: Config, folder: Path, token_ids: Sequence[int], scratch: Path) -> dict[str, np.ndarray]:
    """Return stage name -> output for all tokens but the last, float32 [T − 1, hidden], in order of computation: the
    embedding, each layer and the final norm. The last entry holds the log-probs of all tokens after the first, float32
    [T − 1]. The config's layout must have a single rank. `scratch` is a folder that no other process uses."""
    store = FileStore(str(scratch / "store"), 1)
    worker = ForwardOnlyActor(config, folder, 0, store, torch.get_num_threads())
    [chunk] = worker.chunks
    model, count = model_of(chunk), len(token_ids) - 1
    outputs: dict[str, np.ndarray] = {}

    def keep(stage: str) -> Callable[..., None]:
        def hook(module, inputs, output) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            outputs[stage] = hidden[:count, 0].float().cpu().numpy()

        return hook

    model.get_submodule("embedding").register_forward_hook(keep("embedding"))
    for number, layer in enumerate(model.get_submodule("decoder.layers").children()):
        layer.register_forward_hook(keep(f"layer {number}"))
    model.get_submodule("decoder.final_layernorm").register_forward_hook(keep("final norm"))
    ids, run = np.array(token_ids, np.int32), (VersionRun(0, count),)
    zeros, ones = np.zeros(count, np.float32), np.ones(count, np.bool_)
    sample = Sample("diagnose", Prompt("diagnose", "", ids[:1]), ids[1:], zeros, ones, run, "length", "")
    batch = LocalBatch([SampleRef.of(sample, sample)], [(0,)])
    scored = worker._forward(batch)["diagnose"]
    worker.close()
    return outputs | {"log-probs": scored[:, 0].float().cpu().numpy()}
