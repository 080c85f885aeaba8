"""Describe the weights on a Megatron-core rank: its shard of a GPTModel or Denoiser."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from megarl.config.divisors import divisibility_error, divisors
from megarl.core.errors import UserError
from megarl.models.huggingface import weights_dtype
from megarl.models.shape import ModelShape
from megarl.resharding.families.canonical import Canonical, canonical_of
from megarl.resharding.families.shard_builder import ShardBuilder, Share
from megarl.resharding.piece import Holder, Shard

if TYPE_CHECKING:
    from megarl.config.model_schema import Layout

VOCABULARY_MULTIPLE = 128
"""Megatron pads the vocabulary size to a multiple of this value times tp."""


class Coordinates(NamedTuple):
    """A rank's coordinates in the layout. Ranks with equal coordinates are replicas.

    Expert layers use a separate decomposition of the ranks in a pipeline stage: expert tensor parallel is innermost,
    then expert parallel, then expert data parallel.
    """

    stage: int
    tp_rank: int
    ep_rank: int
    etp_rank: int

    @classmethod
    def of(cls, layout: Layout, rank: int) -> Self:
        """Return the coordinates of a rank: tensor parallel is innermost, then context, data and pipeline parallel."""
        stage, within = divmod(rank, layout.tp * layout.cp * layout.dp)
        ep_rank, etp_rank = divmod(within, layout.expert_tp)
        return cls(stage, rank % layout.tp, ep_rank % layout.ep, etp_rank)


def megatron_holder(
    hf_config: Mapping[str, Any],
    layout: Layout,
    rank: int,
    dtype: str | None = None,
    transformer_engine: bool = False,
    vocab_multiple: int = VOCABULARY_MULTIPLE,
) -> Holder:
    """Return the holder of global rank `rank`, named "megatron:{rank}". Raise a UserError if the model cannot be split
    evenly over the layout. In a run, the config rules reject such a layout earlier, with an error that names its role.

    Args:
        dtype: dtype of the weights, such as "bfloat16". None: the checkpoint's dtype.
        transformer_engine: whether the model uses Transformer Engine layers, which fuse norms into the following linear
            layers.
        vocab_multiple: the vocabulary size is padded to a multiple of vocab_multiple · tp.
    """
    return megatron_holders(hf_config, layout, dtype, transformer_engine, vocab_multiple, [rank])[0]


def megatron_holders(
    hf_config: Mapping[str, Any],
    layout: Layout,
    dtype: str | None = None,
    transformer_engine: bool = False,
    vocab_multiple: int = VOCABULARY_MULTIPLE,
    ranks: Iterable[int] | None = None,
) -> list[Holder]:
    """Return the holders for these ranks; None means all ranks. See `megatron_holder` for the remaining arguments."""
    canonical = canonical_of(hf_config)
    _check_sizes(canonical.model, layout)
    shards: dict[Coordinates, Shard] = {}
    holders = []
    for rank in range(layout.world_size) if ranks is None else ranks:
        coordinates = Coordinates.of(layout, rank)
        if coordinates not in shards:
            builder = ShardBuilder(canonical, dtype or weights_dtype(hf_config))
            shards[coordinates] = _shard(builder, canonical, layout, coordinates, transformer_engine, vocab_multiple)
        holders.append(Holder(f"megatron:{rank}", shards[coordinates]))
    return holders


def _shard(
    builder: ShardBuilder,
    canonical: Canonical,
    layout: Layout,
    coordinates: Coordinates,
    transformer_engine: bool,
    vocab_multiple: int,
) -> Shard:
    model, multiple = canonical.model, vocab_multiple * layout.tp
    share, expert_share = Share(layout.tp, coordinates.tp_rank), Share(layout.expert_tp, coordinates.etp_rank)
    count = model.experts.count // layout.ep if model.experts else 0
    experts = range(coordinates.ep_rank * count, (coordinates.ep_rank + 1) * count)
    for virtual in range(layout.vpp):
        chunk = f"chunk{virtual}."
        is_first = coordinates.stage == virtual == 0
        is_last = coordinates.stage == layout.pp - 1 and virtual == layout.vpp - 1
        for local, tiling in canonical.tilings_before_layers(is_first, multiple).items():
            builder.add(chunk + local, tiling, share)
        layers = {
            f"decoder.layers.{local}.": layer
            for local, layer in enumerate(chunk_layers(model.num_layers, layout)[virtual][coordinates.stage])
        }
        preceding = canonical.preceding_layers() if is_first else {}
        following = canonical.following_layers() if is_last else {}
        for prefix, layer in (preceding | layers | following).items():
            for part in canonical.layer_parts(layer):
                tilings = part.megatron_tilings(transformer_engine, experts)
                builder.add_layer(layer, chunk + prefix, tilings, expert_share if part.per_expert else share)
        for local, tiling in canonical.tilings_after_layers(is_first, is_last, multiple).items():
            builder.add(chunk + local, tiling, share)
    return builder.build()


def chunk_layers(num_layers: int, layout: Layout) -> list[list[range]]:
    """Return the layers in each model chunk, as [virtual stage][pipeline stage].

    A microbatch passes through all pipeline stages once per virtual stage; layers are numbered in this order. Raise a
    UserError if the layers cannot be split evenly.
    """
    sizes = stage_sizes(num_layers, layout)
    for stage, count in enumerate(sizes):
        if count % layout.vpp:
            raise UserError(
                f"vpp={layout.vpp}: the {count} layers of pipeline stage {stage} are not divisible by {layout.vpp}"
                f". Fix: set vpp to a divisor of {count}"
            )
    ends = accumulate(count // layout.vpp for _ in range(layout.vpp) for count in sizes)
    chunks = [range(*span) for span in pairwise((0, *ends))]
    return [chunks[i : i + layout.pp] for i in range(0, len(chunks), layout.pp)]


def stage_sizes(num_layers: int, layout: Layout) -> list[int]:
    """Return the number of layers in each pipeline stage. Raise a UserError if they cannot be split evenly."""
    first, last = layout.first_stage_layers, layout.last_stage_layers
    fixed = {0: first, layout.pp - 1: last}
    counts = [fixed.get(stage) for stage in range(layout.pp)]
    layers_left, stages_left = num_layers - sum(filter(None, counts)), counts.count(None)
    even = layers_left == 0 if stages_left == 0 else layers_left > 0 and layers_left % stages_left == 0
    if not even:
        raise UserError(
            f"pp={layout.pp}, first_stage_layers={first}, last_stage_layers={last}: the remaining {layers_left} of "
            f"{num_layers} layers cannot be distributed evenly over the remaining {stages_left} stages. Fix: choose "
            "pp, first_stage_layers and last_stage_layers so that the remaining stages divide the remaining layers"
        )
    return [layers_left // stages_left if count is None else count for count in counts]


def _check_sizes(model: ModelShape, layout: Layout) -> None:
    tp, experts = layout.tp, model.experts
    sizes = [("tp", tp, "attention heads", model.heads), ("tp", tp, "KV heads", model.kv_heads)]
    if experts is None or not all(experts.layers):
        sizes.append(("tp", tp, "MLP rows (intermediate_size)", model.intermediate))
    if experts is not None:
        sizes.append(("ep", layout.ep, "experts", experts.count))
        sizes.append(("etp", layout.expert_tp, "MLP rows of an expert", experts.intermediate))
        sizes.append(("tp", tp, "MLP rows of the shared experts", experts.shared_intermediate))
        if experts.is_interleaved and layout.expert_tp > 1:
            raise UserError(
                f"etp={layout.expert_tp}: the model's experts have biases, which Megatron does not support in sharded "
                "experts. Fix: set etp=1"
            )
    if model.linear is not None:
        sizes.append(("tp", tp, "key heads of the gated delta nets", model.linear.key_heads))
    for key, ranks, name, size in sizes:
        if message := divisibility_error(key, ranks, name, size, divisors(size)):
            raise UserError(message)
