"""Check the config and the config.json of a model that drafts tokens for compatibility, as in `megarl.models.rules`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megarl.config.schema import Config
from megarl.config.violations import raise_all
from megarl.core.errors import UserError
from megarl.models.classifier import score_head_of
from megarl.models.denoiser import is_denoiser
from megarl.models.families import completed
from megarl.models.folder import DRAFT_KEY
from megarl.models.huggingface import linear_attention
from megarl.models.rules.engine import engine_router_keys_are_present, engine_sizes_divide_by_tp


def check_draft_model(config: Config, hf_config: Mapping[str, Any], draft_hf_config: Mapping[str, Any]) -> None:
    """Check the config against the draft model's config.json. Raise a UserError as in `check_model`."""
    key = f"{DRAFT_KEY}={config.rollout.speculative.path}"
    if is_denoiser(draft_hf_config):
        raise UserError(f"{key}: the model is an image model. Fix: use a language model")
    try:
        model = completed(draft_hf_config)
    except ValueError as error:
        raise UserError(f"{key}: {error}") from None
    if score_head_of(model) is not None:
        raise UserError(
            f"{key}: its architecture is {', '.join(model['architectures'])}, which has no output layer to draft "
            "tokens with. Fix: use a ...ForCausalLM model"
        )
    violations = [f"{key}: {line}" for line in engine_sizes_divide_by_tp("rollout.tp", config.rollout.tp, model)]
    violations += [*engine_router_keys_are_present(key, model), *draft_vocabulary_equals_actors(key, hf_config, model)]
    violations += draft_has_no_delta_nets(key, model)
    raise_all(violations)


def draft_vocabulary_equals_actors(
    key: str, hf_config: Mapping[str, Any], draft_hf_config: Mapping[str, Any]
) -> Iterator[str]:
    size, drafts = hf_config["vocab_size"], draft_hf_config["vocab_size"]
    if size != drafts:
        yield (
            f"{key}: its vocab_size is {drafts}, but that of model.path is {size}, and vLLM requires equal sizes. Fix: "
            "resize the embeddings of the draft model, or use another one"
        )


def draft_has_no_delta_nets(key: str, draft_hf_config: Mapping[str, Any]) -> Iterator[str]:
    if linear_attention(draft_hf_config) is not None:
        yield (
            f"{key}: the model has gated delta nets, but vLLM requires that all layers of a draft model have the same "
            "kind of attention. Fix: use a draft model without gated delta nets, or set "
            "rollout.speculative.method=ngram"
        )
