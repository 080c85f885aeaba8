"""Check whether the config is compatible with the config.json of a model that drafts tokens, as in
`megarl.models.rules`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megarl.config.schema import Config
from megarl.config.violations import raise_all
from megarl.core.errors import UserError
from megarl.models.classifier import score_head_of
from megarl.models.denoiser import is_denoiser
from megarl.models.eagle import ARCHITECTURES, LAYER_IDS, WITHOUT_HIDDEN_STATES, EagleDraft, is_eagle
from megarl.models.families import completed
from megarl.models.folder import DRAFT_KEY
from megarl.models.huggingface import linear_attention
from megarl.models.multimodal import WHOLE_ONLY
from megarl.models.rules.engine import engine_router_keys_are_present, engine_sizes_divide_by_tp
from megarl.models.rules.vision import only_policies

OTHER_DRAFT = "use a draft that was trained for model.path"
WITHOUT_DRAFT = "set rollout.speculative.method=ngram and rollout.speculative.path=null"


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
    if model["model_type"] in WHOLE_ONLY:
        violations.append(f"{key}: {only_policies(model)}")
    violations += [*draft_has_no_delta_nets(key, model), *draft_is_of_the_methods_kind(config, key, model)]
    if config.rollout.drafts_with_eagle and is_eagle(model):
        violations += [*policy_returns_hidden_states(hf_config), *draft_reads_hidden_states(key, hf_config, model)]
        violations += draft_tokens_are_the_policys(key, hf_config, model)
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


def draft_is_of_the_methods_kind(config: Config, key: str, draft: Mapping[str, Any]) -> Iterator[str]:
    names = ", ".join(draft.get("architectures") or ())
    if config.rollout.drafts_with_eagle and not is_eagle(draft):
        expected = ", ".join(name for family in ARCHITECTURES.values() for name in family)
        found = f"model_type={draft['model_type']}, architectures=[{names}]"
        yield (
            f"{key}: not an EAGLE-3 draft that vLLM can load ({found}). vLLM loads {expected}, and "
            "the same names without Eagle3 if config.json has draft_vocab_size. Fix: use such a draft, or "
            "set rollout.speculative.method=draft_model"
        )
    elif not config.rollout.drafts_with_eagle and is_eagle(draft):
        yield f"{key}: the model is an EAGLE-3 draft ({names}). Fix: set rollout.speculative.method=eagle3"


def policy_returns_hidden_states(policy: Mapping[str, Any]) -> Iterator[str]:
    if policy["model_type"] in WITHOUT_HIDDEN_STATES:
        yield (
            f"rollout.speculative.method=eagle3: vLLM does not return the hidden states of {policy['model_type']} "
            f"models, which EAGLE-3 drafts read. Fix: {WITHOUT_DRAFT}"
        )


def draft_reads_hidden_states(key: str, policy: Mapping[str, Any], draft: Mapping[str, Any]) -> Iterator[str]:
    """Require that the draft reads existing layers of the policy, and states of the policy's size. Otherwise, vLLM
    would fail when it drafts the first tokens."""
    eagle, num_layers = EagleDraft.of(draft), policy["num_hidden_layers"]
    if not (draft.get("eagle_config") or {}).get("use_aux_hidden_state", True):
        yield (
            f"{key}: its eagle_config has use_aux_hidden_state=false, which vLLM 0.32 does not support on GPUs. "
            f"Fix: {OTHER_DRAFT}"
        )
        return
    if eagle.policy_hidden != policy["hidden_size"]:
        name = "target_hidden_size" if draft.get("target_hidden_size") else "hidden_size"
        yield (
            f"{key}: its {name} is {eagle.policy_hidden}, but the hidden_size of model.path is "
            f"{policy['hidden_size']}. Fix: {OTHER_DRAFT}"
        )
    layers = eagle.layers_of(num_layers)
    if not all(0 <= layer <= num_layers for layer in layers) or len(set(layers)) != eagle.num_states:
        source = "vLLM's default" if eagle.layer_ids is None else LAYER_IDS
        yield (
            f"{key}: the draft reads {eagle.num_states} hidden states, so {source} must list {eagle.num_states} "
            f"different layers from 0 to {num_layers} (the layers of model.path), but it is {list(layers)}. Fix: "
            f"{OTHER_DRAFT}, or set {LAYER_IDS} in its config.json"
        )


def draft_tokens_are_the_policys(key: str, policy: Mapping[str, Any], draft: Mapping[str, Any]) -> Iterator[str]:
    size, drafts = policy["vocab_size"], EagleDraft.of(draft).vocab
    if not 0 < drafts <= size:
        yield f"{key}: its draft_vocab_size is {drafts}, expected 1 to {size}. Fix: {OTHER_DRAFT}"
