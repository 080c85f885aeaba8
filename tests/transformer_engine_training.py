"""Updates of models whose layers are Transformer Engine's, in a process in which Megatron finds it."""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.distributed.test_lora import AdapterResult
    from tests.parity import RankResult


@dataclass(frozen=True)
class Trained:
    """What a rank has after its updates, the kernels it says it takes, the layers that ran in fp8, and the calls of
    Transformer Engine's attention."""

    rank: RankResult | AdapterResult
    kernels: str
    quantized: set[tuple[str, str, str]]
    attended: int


def main() -> None:
    """Make an update with each case of FOLDER/cases.json, name -> [folder of the model, overrides, what to pack
    differently], and writes what comes of it to FOLDER/trained."""
    from tests import transformer_engine

    transformer_engine.install()
    from megarl.core import device
    from megarl.megatron.model import layer_spec

    layer_spec.uses_transformer_engine = lambda: True  # before others import it by its name
    device.capability = lambda: (10, 0)
    import torch.distributed as dist

    from megarl.megatron import parallel
    from megarl.megatron.model import kernels
    from tests.distributed.test_lora import train_adapters
    from tests.parity import branching_group, config_of, random_groups, train

    folder = Path(sys.argv[1])
    trained = {}
    for name, (model, overrides, packing) in json.loads((folder / "cases.json").read_text()).items():
        transformer_engine.quantized.clear()
        transformer_engine.attended.clear()
        store = dist.FileStore(str(folder / f"store {name}"), 1)
        try:
            config = config_of(Path(model), "actor.tokens_per_microbatch=256", *overrides)
            make_updates = train if config.actor.adapters is None else train_adapters
            rank = make_updates(store, 0, config, Path(model), [[*random_groups(0), branching_group(0)]], **packing)
        except BaseException as error:
            error.add_note(f"in the case: {name}")
            raise
        observed = set(transformer_engine.quantized), len(transformer_engine.attended)
        trained[name] = Trained(rank, kernels.describe(), *observed)
        parallel.destroy()
    (folder / "trained").write_bytes(pickle.dumps(trained))


if __name__ == "__main__":
    # Under its own name, so that what it pickles is found again.
    from tests.transformer_engine_training import main

    main()
