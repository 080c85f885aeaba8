"""Train models with Transformer Engine layers, in a process where Megatron finds Transformer Engine."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.paths import ROOT

if TYPE_CHECKING:
    from tests.distributed.test_lora import AdapterResult
    from tests.parity import RankResult


@dataclass(frozen=True)
class Trained:
    """A rank's result.

    Attributes:
        kernels: the kernels that it reports.
        quantized: the layers that ran in fp8, see transformer_engine.quantized.
        attended: number of calls to Transformer Engine's attention.
    """

    rank: RankResult | AdapterResult
    kernels: str
    quantized: set[tuple[str, str, str]]
    attended: int


def train_all(folder: Path, cases: Mapping[str, tuple[str, list[str], dict[str, Any]]]) -> dict[str, Trained]:
    """Run one update per case. All cases share a process, because starting one takes seconds.

    A case is (model folder, config overrides, Packing overrides). Cases and results are exchanged through `folder`.
    """
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-W", "ignore", "-m", "tests.transformer_engine_training", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return pickle.loads((folder / "trained").read_bytes())


def main() -> None:
    """Run an update with each case of FOLDER/cases.json and pickle the results to FOLDER/trained."""
    from tests import transformer_engine

    transformer_engine.install()
    from megarl.core import device
    from megarl.megatron.model import layer_spec

    layer_spec.uses_transformer_engine = lambda: True  # patch it before other modules import the name
    device.capability = lambda: (10, 0)
    import pytest
    import torch.distributed as dist

    from megarl.megatron import parallel
    from megarl.megatron.model import kernels
    from tests import dense_gpt_oss
    from tests.distributed.test_lora import train_adapters
    from tests.distributed.test_vision import groups_of
    from tests.parity import branching_group, config_of, random_groups, train

    dense_gpt_oss.register(pytest.MonkeyPatch())
    folder = Path(sys.argv[1])
    trained = {}
    for name, (model, overrides, packing) in json.loads((folder / "cases.json").read_text()).items():
        transformer_engine.quantized.clear()
        transformer_engine.attended.clear()
        store = dist.FileStore(str(folder / f"store {name}"), 1)
        try:
            config = config_of(Path(model), "actor.tokens_per_microbatch=256", *overrides)
            make_updates = train if config.actor.adapters is None else train_adapters
            text = [*random_groups(0), branching_group(0)]
            groups = groups_of(Path(model)) if config.model.vision else text
            rank = make_updates(store, 0, config, Path(model), [groups], **packing)
        except BaseException as error:
            error.add_note(f"in case {name!r}")
            raise
        observed = set(transformer_engine.quantized), len(transformer_engine.attended)
        trained[name] = Trained(rank, kernels.describe(), *observed)
        parallel.destroy()
    (folder / "trained").write_bytes(pickle.dumps(trained))


if __name__ == "__main__":
    # Import the module by name, so that its classes can be unpickled elsewhere.
    from tests.transformer_engine_training import main

    main()
