"""Check the config and a model's config.json for compatibility."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import gcd
from typing import Any

from megarl.config.divisors import divisibility_error, divisors, listed, quotient
from megarl.config.model_schema import Placed
from megarl.config.schema import Config
from megarl.config.violations import raise_all
from megarl.core.errors import UserError
from megarl.models.classifier import Kind, score_head_of
from megarl.models.huggingface import (
    FP8_BLOCK,
    attention_window,
    completed,
    experts,
    kv_heads,
    latent_attention,
    unsupported,
)

EXPERT_ROWS = "MLP rows of an expert"


def check_model(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Check the config against the actor's config.json.

    Raises:
        UserError: a rule is violated. The message has one line per violated rule.
    """
    model = _completed(config, config.actor, hf_config)
    actor_violations = [rule(config, config.actor, model) for rule in _PLACED_MODEL_RULES]
    actor_violations.append(expert_keys_require_experts(config, model))
    actor_violations.append(trust_region_requires_dense_model(config, model))
    head = score_head_of(model)
    if config.is_offline:
        labels = has_one_label(config, config.actor, head.num_labels) if config.trains_reward_model and head else None
        kind = classifier_kind_fits_objective(config, head.kind) if head else None
        raise_all([*actor_violations, labels, kind])
        return
    engine_violations = _broken_by_engine("rollout.tp", config.rollout.tp, _model(config, config.actor), model)
    sampling_violations = top_k_fits_the_vocabulary(config, model), engine_shards_keep_blocks_whole(config, model)
    raise_all([*actor_violations, *engine_violations, *sampling_violations])


def check_critic_model(config: Config, hf_config: Mapping[str, Any], critic_hf_config: Mapping[str, Any]) -> None:
    """Check the config against the config.json of the critic's initial model, as in `check_model`."""
    critic = _completed(config, config.critic, critic_hf_config)
    critic_violations = [rule(config, config.critic, critic) for rule in _PLACED_MODEL_RULES]
    head = score_head_of(critic)
    labels = None if head is None else has_one_label(config, config.critic, head.num_labels)
    raise_all([*critic_violations, labels, vocabulary_covers_actors(config, config.critic, hf_config, critic)])


def check_reward_model(config: Config, hf_config: Mapping[str, Any], reward_hf_config: Mapping[str, Any]) -> None:
    """Check the config against the reward model's config.json, as in `check_model`."""
    placed = config.reward_model
    reward = _completed(config, placed, reward_hf_config)
    if placed.engine == "megatron":
        reward_violations = [rule(config, placed, reward) for rule in _PLACED_MODEL_RULES]
    else:
        engine_violations = _broken_by_engine(
            "reward_model.layout.tp", placed.layout.tp, _model(config, placed), reward
        )
        model_rules = (context_fits_the_positions, features_are_supported)
        reward_violations = [*engine_violations, *(rule(config, placed, reward) for rule in model_rules)]
    head = score_head_of(reward)
    architectures = ", ".join(reward.get("architectures") or ["none"])
    if placed.judges and head is not None:
        raise UserError(
            f"{_model(config, placed)}: its architecture is {architectures}, but reward_model.input_format=question "
            "requires a language model. Fix: use a ...ForCausalLM model, or set reward_model.input_format=ids, text "
            "or chat"
        )
    if placed.judges:
        raise_all(reward_violations)
        return
    if head is None:
        raise UserError(
            f"{_model(config, placed)}: its architecture is {architectures}, which has no score head. Fix: use a "
            "classification checkpoint (...ForSequenceClassification or ...ForTokenClassification), or set "
            "reward_model.input_format=question to use it as a judge"
        )
    labels = has_one_label(config, placed, head.num_labels)
    kind_violations = [
        rule(config, head.kind) for rule in (step_end_requires_token_classifier, token_scores_require_sampled_tokens)
    ]
    tokens = vocabulary_covers_actors(config, placed, hf_config, reward) if placed.input_format == "ids" else None
    raise_all([*reward_violations, labels, *kind_violations, tokens])


def check_implicit_reward_model(
    config: Config, hf_config: Mapping[str, Any], reward_hf_config: Mapping[str, Any]
) -> None:
    """Check the config against the implicit reward model's config.json, as in `check_model`."""
    placed = config.implicit_reward
    model = _completed(config, placed, reward_hf_config)
    violations = [rule(config, placed, model) for rule in _PLACED_MODEL_RULES]
    if score_head_of(model) is not None:
        raise UserError(
            f"{_model(config, placed)}: its architecture is {', '.join(model['architectures'])}, but the log-probs for "
            "token rewards require a language model. Fix: use a ...ForCausalLM model"
        )
    raise_all([*violations, vocabulary_covers_actors(config, placed, hf_config, model)])


def model_config_is_complete(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    needed = ("intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers")
    missing = [name for name in needed if name not in hf]
    if not missing:
        return None
    return (
        f"{_model(config, placed)}: its config.json lacks {', '.join(missing)}. Fix: use the config.json of the "
        "original model"
    )


def attention_heads_divide_by_tp(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    return _tensor_parallel(config, placed, hf, "attention heads", hf["num_attention_heads"])


def kv_heads_divide_by_tp(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    return _tensor_parallel(config, placed, hf, "KV heads", kv_heads(hf))


def mlp_divides_by_tp(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    if not _has_dense_layers(hf):
        return None
    return _tensor_parallel(config, placed, hf, "MLP rows (intermediate_size)", hf["intermediate_size"])


def experts_divide_by_ep(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    role = placed.section
    ep, mixture = placed.layout.ep, experts(hf)
    if mixture is not None:
        return divisibility_error(f"{role}.layout.ep", ep, "experts", mixture.count, divisors(mixture.count))
    if ep == 1:
        return None
    return f"{role}.layout.ep={ep}: {_model(config, placed)} has no experts. Fix: set {role}.layout.ep=1"


def expert_mlp_divides_by_etp(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    role = placed.section
    mixture = experts(hf)
    if mixture is None:
        return None
    layout, rows = placed.layout, mixture.intermediate
    key = f"{role}.layout.tp" if layout.etp is None else f"{role}.layout.etp"
    return divisibility_error(key, layout.expert_tp, "MLP rows of an expert", rows, divisors(rows))


def expert_keys_require_experts(config: Config, hf: Mapping[str, Any]) -> str | None:
    keys = config.actor.experts
    if experts(hf) is not None:
        return None
    lines = []
    if keys.replay_routes:
        lines.append("actor.experts.replay_routes=true: {} has no experts. Fix: set actor.experts.replay_routes=false")
    if keys.router != "free":
        lines.append("actor.experts.router=frozen: {} has no routers. Fix: set actor.experts.router=free")
    return "\n".join(line.format(_model(config, config.actor)) for line in lines) or None


def trust_region_requires_dense_model(config: Config, hf: Mapping[str, Any]) -> str | None:
    limit = config.algorithm.trust_region.kl_limit
    if limit is None or experts(hf) is None:
        return None
    return (
        f"algorithm.trust_region.kl_limit={limit:g}: TRPO computes differences between passes, but "
        f"{_model(config, config.actor)} may route a token to different experts in each pass. Fix: set "
        "algorithm.trust_region.kl_limit=null"
    )


def shared_experts_divide_by_tp(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    mixture = experts(hf)
    if mixture is None or not mixture.shared_intermediate:
        return None
    rows, tp = mixture.shared_intermediate, placed.layout.tp
    return divisibility_error(f"{placed.section}.layout.tp", tp, "MLP rows of the shared experts", rows, divisors(rows))


def experts_and_tensor_parallel_need_sequence_parallel(
    config: Config, placed: Placed, hf: Mapping[str, Any]
) -> str | None:
    role, layout = placed.section, placed.layout
    if layout.tp == 1 or layout.sequence_parallel or experts(hf) is None:
        return None
    return (
        f"{role}.layout.tp={layout.tp}, sequence_parallel=false: every rank would dispatch all tokens to the experts, "
        f"which Megatron rejects. Fix: set {role}.layout.sequence_parallel=true"
    )


def layers_tile_the_stages(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    """Require that the remaining layers split evenly over the stages without an explicit size, at least one each."""
    role = placed.section
    layout, num_layers = placed.layout, hf["num_hidden_layers"]
    uneven = {name: layers for name, layers in layout.uneven_stages.items() if layers is not None}
    rest, stages = num_layers - sum(uneven.values()), layout.pp - len(uneven)
    if (rest == 0) if stages == 0 else (rest >= stages and rest % stages == 0):
        return None
    subtracted = "".join(f" - {layers}" for layers in uneven.values())
    keys = "".join(f", {name}={layers}" for name, layers in uneven.items())
    difference = f"{num_layers}{subtracted} = {rest}" if uneven else f"{num_layers}"
    problem = (
        f"{role}.layout.pp={layout.pp}{keys}: {num_layers} layers cannot be split evenly over the stages: {difference} "
        f"layers over {stages} {'other ' if uneven else ''}{'stage' if stages == 1 else 'stages'}"
    )
    if stages > 0:
        problem += f" ({quotient(rest, stages)})"
    return f"{problem}. Fix: {_stage_fix(layout.pp, num_layers)}"


def virtual_stages_tile_each_stage(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    """Require that the layers in each pipeline stage can be split evenly over its virtual stages."""
    role = placed.section
    layout, num_layers = placed.layout, hf["num_hidden_layers"]
    if layers_tile_the_stages(config, placed, hf) is not None:
        return None
    uneven = {name: layers for name, layers in layout.uneven_stages.items() if layers is not None}
    others = layout.pp - len(uneven)
    sizes = uneven | ({"the other stages": (num_layers - sum(uneven.values())) // others} if others else {})
    legal = divisors(gcd(*sizes.values()))
    lines = (
        divisibility_error(f"{role}.layout.vpp", layout.vpp, f"layers of a pipeline stage ({name})", layers, legal)
        for name, layers in sizes.items()
    )
    return next((line for line in lines if line is not None), None)


def top_k_fits_the_vocabulary(config: Config, hf: Mapping[str, Any]) -> str | None:
    top_k = config.rollout.top_k
    if top_k is None or top_k <= hf["vocab_size"]:
        return None
    return (
        f"rollout.top_k={top_k}: the model's vocabulary has {hf['vocab_size']} tokens. Fix: set rollout.top_k to at "
        f"most {hf['vocab_size']}, or to null to keep all tokens"
    )


def engine_heads_divide_by_tp(key: str, tp: int, hf: Mapping[str, Any]) -> str | None:
    return divisibility_error(key, tp, "attention heads", hf["num_attention_heads"], _engine_sizes(hf))


def engine_kv_heads_split_or_repeat(key: str, tp: int, hf: Mapping[str, Any]) -> str | None:
    """Require that the engine can split KV heads over its ranks, or replicate them if it has more ranks than heads."""
    heads = kv_heads(hf)
    if tp % heads == 0:
        return None
    return divisibility_error(key, tp, "KV heads", heads, _engine_sizes(hf))


def engine_mlp_divides_by_tp(key: str, tp: int, hf: Mapping[str, Any]) -> str | None:
    if not _has_dense_layers(hf):
        return None
    return divisibility_error(key, tp, "MLP rows (intermediate_size)", hf["intermediate_size"], _engine_sizes(hf))


def engine_expert_mlp_divides_by_tp(key: str, tp: int, hf: Mapping[str, Any]) -> str | None:
    mixture = experts(hf)
    if mixture is None:
        return None
    return divisibility_error(key, tp, "MLP rows of an expert", mixture.intermediate, _engine_sizes(hf))


def engine_shards_keep_blocks_whole(config: Config, hf: Mapping[str, Any]) -> str | None:
    """Require that the shards of a quantized tensor start and end at block boundaries.

    vLLM rejects shards that split blocks, except in layers that merge several tensors, where it uses incorrect scales.
    """
    tp = config.rollout.tp
    if config.rollout.quantization is None or tp not in _engine_sizes(hf):
        return None
    whole_experts = config.rollout.has_whole_experts
    uneven = {name: size for name, size in _shard_sizes(hf, tp, whole_experts).items() if size % FP8_BLOCK}
    if not uneven:
        return None
    legal = [
        size
        for size in _engine_sizes(hf)
        if not any(n % FP8_BLOCK for n in _shard_sizes(hf, size, whole_experts).values())
    ]
    fix = f"set rollout.tp to {listed(legal)}" if legal else "set rollout.quantization=null"
    if uneven.keys() == {EXPERT_ROWS} and not whole_experts:
        fix += ", or set rollout.vllm_overrides={enable_expert_parallel: true} so that each expert stays on one rank"
    name, size = next(iter(uneven.items()))
    return (
        f"rollout.quantization={config.rollout.quantization}: with rollout.tp={tp} an engine rank has {size} {name}, "
        f"which is not a multiple of the block size {FP8_BLOCK}. Fix: {fix}"
    )


def _shard_sizes(hf: Mapping[str, Any], tp: int, whole_experts: bool) -> dict[str, int]:
    """Return the sizes of an engine rank's quantized shards: description -> number of rows or columns.

    Contains only shards that are split between ranks or merged with others.
    """
    mixture, latent = experts(hf), latent_attention(hf)
    sizes: dict[str, int] = {}
    if _has_dense_layers(hf):
        sizes["MLP rows"] = hf["intermediate_size"] // tp
    if mixture is not None:
        sizes[EXPERT_ROWS] = mixture.intermediate // (1 if whole_experts else tp)
        sizes["MLP rows of the shared experts"] = mixture.shared_intermediate // tp
    heads = hf["num_attention_heads"]
    if latent is None:
        head_dim = hf["head_dim"] or hf["hidden_size"] // heads
        return sizes | {
            "query rows": heads // tp * head_dim,
            "key rows": max(1, kv_heads(hf) // tp) * head_dim,
        }
    if latent.query_rank is not None:
        sizes["rows of the query latent"] = latent.query_rank
    if tp > 1:
        sizes["query rows"] = heads // tp * (latent.content_dim + latent.position_dim)
        sizes["key and value rows"] = heads // tp * (latent.content_dim + latent.value_dim)
        sizes["columns of the output projection"] = heads // tp * latent.value_dim
    return sizes


def context_fits_the_positions(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    (key, context), positions = config.context_of(placed), hf["max_position_embeddings"]
    if context <= positions:
        return None
    return (
        f"{key}={context}: the model has {positions} positions (max_position_embeddings). Fix: set {key} to at most "
        f"{positions}"
    )


def attention_is_full(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    """Require that the attention window, if any, covers the longest sample, so that attention is full."""
    window, (key, context) = attention_window(hf), config.context_of(placed)
    if window is None or context <= window:
        return None
    return (
        f"{key}={context}: it exceeds the model's sliding_window={window}, but the trainer computes full attention. "
        f"Fix: set {key} to at most {window}"
    )


def features_are_supported(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    features = unsupported(hf)
    if not features:
        return None
    return f"{_model(config, placed)}: megarl does not support {' and '.join(features)}. Fix: use another model"


def has_one_label(config: Config, placed: Placed, num_labels: int) -> str | None:
    if num_labels == 1:
        return None
    return (
        f"{_model(config, placed)}: the model has {num_labels} labels (id2label), but a score is a single number. Fix: "
        "use a classification checkpoint with num_labels=1"
    )


def vocabulary_covers_actors(
    config: Config, placed: Placed, actor: Mapping[str, Any], model: Mapping[str, Any]
) -> str | None:
    """Require that the vocabulary of a model that processes the actor's token ids is not smaller than the actor's."""
    if model["vocab_size"] >= actor["vocab_size"]:
        return None
    return (
        f"{_model(config, placed)}: its vocab_size={model['vocab_size']} is smaller than the actor's "
        f"vocab_size={actor['vocab_size']}, but it reads the actor's token ids. Fix: use a model with the actor's "
        "tokenizer"
    )


def classifier_kind_fits_objective(config: Config, kind: Kind) -> str | None:
    objective = config.algorithm.objective
    if objective.spec.classifier in (None, kind):
        return None
    names = {"sequence": "...ForSequenceClassification", "token": "...ForTokenClassification"}
    trained, actual = names[objective.spec.classifier], names[kind]
    return (
        f"{_model(config, config.actor)}: its architecture is {actual}, but algorithm.objective.name={objective.name} "
        f"trains {trained}. Fix: use a {trained} model, or a language model, to which megarl adds a new head"
    )


def step_end_requires_token_classifier(config: Config, kind: str) -> str | None:
    if config.reward_model.step_end is None or kind == "token":
        return None
    return (
        f"reward_model.step_end={config.reward_model.step_end!r}: {_model(config, config.reward_model)} scores whole "
        "samples (...ForSequenceClassification). Fix: set reward_model.step_end=null"
    )


def token_scores_require_sampled_tokens(config: Config, kind: str) -> str | None:
    """Require sampled tokens for token-level scores, because only sampled tokens are actions."""
    settings = config.reward_model
    outcome = settings.aggregation is not None or config.algorithm.advantage.estimator != "gae"
    if settings.input_format == "ids" or kind == "sequence" or outcome or settings.step_end is not None:
        return None
    return (
        f"reward_model.input_format={settings.input_format}: {_model(config, settings)} scores the tokens of its own "
        "tokenizer, but gae needs scores of the sampled tokens. Fix: set reward_model.step_end, "
        "reward_model.aggregation=mean or reward_model.input_format=ids"
    )


def engine_router_keys_are_present(model: str, hf: Mapping[str, Any]) -> str | None:
    """Require the keys for DeepSeek-V3's router that vLLM reads from config.json. transformers does not write them."""
    required = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    missing = [key for key in required if key not in hf]
    if hf["model_type"] != "deepseek_v3" or not missing:
        return None
    return (
        f"{model}: its config.json lacks {' and '.join(missing)}, so the engine would route with softmax and without "
        f"the bias. Fix: add {' and '.join(f'{key}: {required[key]}' for key in missing)} to config.json"
    )


_PLACED_MODEL_RULES: tuple[Callable[[Config, Placed, Mapping[str, Any]], str | None], ...] = (
    attention_heads_divide_by_tp,
    kv_heads_divide_by_tp,
    mlp_divides_by_tp,
    experts_divide_by_ep,
    expert_mlp_divides_by_etp,
    shared_experts_divide_by_tp,
    experts_and_tensor_parallel_need_sequence_parallel,
    layers_tile_the_stages,
    virtual_stages_tile_each_stage,
    context_fits_the_positions,
    attention_is_full,
    features_are_supported,
)
"""Rules for a model's config section and its config.json."""

_ENGINE_RULES: tuple[Callable[[str, int, Mapping[str, Any]], str | None], ...] = (
    engine_heads_divide_by_tp,
    engine_kv_heads_split_or_repeat,
    engine_mlp_divides_by_tp,
    engine_expert_mlp_divides_by_tp,
)
"""Rules for a model and the tensor-parallel size of its engine."""


def _broken_by_engine(key: str, tp: int, model: str, hf: Mapping[str, Any]) -> list[str | None]:
    """Return the results of the engine rules for a model. model: config key and value of the model's path."""
    return [*(rule(key, tp, hf) for rule in _ENGINE_RULES), engine_router_keys_are_present(model, hf)]


def _completed(config: Config, placed: Placed, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    try:
        model = completed(hf_config)
    except ValueError as error:
        raise UserError(f"{_model(config, placed)}: {error}") from None
    if violation := model_config_is_complete(config, placed, model):
        raise UserError(violation)
    return model


def _tensor_parallel(config: Config, placed: Placed, hf: Mapping[str, Any], noun: str, number: int) -> str | None:
    role = placed.section
    rows = [hf["intermediate_size"]] if _has_dense_layers(hf) else []
    legal = divisors(gcd(hf["num_attention_heads"], kv_heads(hf), *rows))
    return divisibility_error(f"{role}.layout.tp", placed.layout.tp, noun, number, legal)


def _has_dense_layers(hf: Mapping[str, Any]) -> bool:
    mixture = experts(hf)
    return mixture is None or not all(mixture.layers)


def _engine_sizes(hf: Mapping[str, Any]) -> list[int]:
    mixture, heads = experts(hf), kv_heads(hf)
    rows = [hf["intermediate_size"]] if _has_dense_layers(hf) else []
    rows += [mixture.intermediate] if mixture else []
    sizes = divisors(gcd(hf["num_attention_heads"], *rows))
    return [tp for tp in sizes if heads % tp == 0 or tp % heads == 0]


def _stage_fix(pp: int, num_layers: int) -> str:
    fix = f"set pp to {listed(divisors(num_layers))} with first_stage_layers=null and last_stage_layers=null"
    per_stage = -(-num_layers // pp)
    last = num_layers - (pp - 1) * per_stage
    if pp in divisors(num_layers) or last < 1:
        return fix
    return f"{fix}, or last_stage_layers={last} alone ({pp - 1} x {per_stage} + {last} = {num_layers})"


def _model(config: Config, placed: Placed) -> str:
    path = None if placed is config.actor else placed.path
    return f"model.path={config.model.path}" if path is None else f"{placed.section}.path={path}"
