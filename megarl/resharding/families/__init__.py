"""Model families: how trainers, engines and checkpoints shard each architecture."""

from megarl.resharding.families.diffusers import diffusers_holders
from megarl.resharding.families.huggingface import huggingface_holder, output_rows_holder
from megarl.resharding.families.megatron import megatron_holder, megatron_holders
from megarl.resharding.families.quantized import quantized_destinations, quantized_sources
from megarl.resharding.families.vllm import vllm_holder, vllm_holders

__all__ = [
    "diffusers_holders",
    "huggingface_holder",
    "megatron_holder",
    "megatron_holders",
    "output_rows_holder",
    "quantized_destinations",
    "quantized_sources",
    "vllm_holder",
    "vllm_holders",
]
