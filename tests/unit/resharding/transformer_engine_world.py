"""Build models with Transformer Engine layers, as GPU ranks do, in a process in which Megatron can import it."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Read a list of (config.json, layout, rank) from stdin and print the shapes of each rank's parameters."""
    from tests import transformer_engine

    transformer_engine.install()
    from megarl.config.model_schema import Layout
    from megarl.megatron.model import build, layer_spec
    from tests.unit.resharding.megatron_world import real_rank

    for module in (layer_spec, build):
        module.uses_transformer_engine = lambda: True
    kernels, in_no_memory = build._kernels, dict(use_cpu_initialization=False, init_model_with_meta_device=True)
    build._kernels = lambda *arguments: kernels(*arguments) | in_no_memory
    ranks = [real_rank(config, Layout(**layout), rank) for config, layout, rank in json.load(sys.stdin)]
    print(json.dumps([rank.shapes for rank in ranks]))


if __name__ == "__main__":
    main()
