"""The rules between the configuration and a model's config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import gcd
from typing import Any

from megarl.config.divisors import divisors, does_not_divide, listed, quotient
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
    """Check the keys against the content of the model's config.json. Raises UserError with a line per broken rule."""
    model = _completed(config, config.actor, hf_config)
    actor_violations = [rule(config, config.actor, model) for rule in _PLACED_MODEL_RULES]
    actor_violations.append(keys_of_experts_have_some(config, model))
    actor_violations.append(trust_region_is_of_a_dense_model(config, model))
    head = score_head_of(model)
    if config.is_offline:
        labels = has_one_label(config, config.actor, head.num_labels) if config.trains_reward_model and head else None
        kind = trained_classifier_scores_what_is_labelled(config, head.kind) if head else None
        raise_all([*actor_violations, labels, kind])
        return
    engine_violations = _broken_by_engine("rollout.tp", config.rollout.tp, _model(config, config.actor), model)
    sampling_violations = kept_tokens_are_in_the_vocabulary(config, model), engine_cuts_keep_blocks_whole(config, model)
    raise_all([*actor_violations, *engine_violations, *sampling_violations])


def check_critic_model(config: Config, hf_config: Mapping[str, Any], critic_hf_config: Mapping[str, Any]) -> None:
    """Check the model that the critic starts from likewise. critic_hf_config: its config.json."""
    critic = _completed(config, config.critic, critic_hf_config)
    critic_violations = [rule(config, config.critic, critic) for rule in _PLACED_MODEL_RULES]
    head = score_head_of(critic)
    labels = None if head is None else has_one_label(config, config.critic, head.num_labels)
    raise_all([*critic_violations, labels, knows_every_token(config, config.critic, hf_config, critic)])


def check_reward_model(config: Config, hf_config: Mapping[str, Any], reward_hf_config: Mapping[str, Any]) -> None:
    """Check the reward model likewise. reward_hf_config: its config.json."""
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
            f"{_model(config, placed)}: its architecture is {architectures}, and reward_model.input_format=question asks a "
            "language model; take one (...ForCausalLM), or set reward_model.input_format=ids, text or chat"
        )
    if placed.judges:
        raise_all(reward_violations)
        return
    if head is None:
        raise UserError(
            f"{_model(config, placed)}: its architecture is {architectures}, without scores; take a classification "
            "checkpoint (...ForSequenceClassification or ...ForTokenClassification), or set "
            "reward_model.input_format=question, and it judges"
        )
    labels = has_one_label(config, placed, head.num_labels)
    kind_violations = [
        rule(config, head.kind) for rule in (steps_are_of_a_token_classifier, rewarded_tokens_are_the_sampled)
    ]
    tokens = knows_every_token(config, placed, hf_config, reward) if placed.input_format == "ids" else None
    raise_all([*reward_violations, labels, *kind_violations, tokens])


def check_implicit_reward_model(
    config: Config, hf_config: Mapping[str, Any], reward_hf_config: Mapping[str, Any]
) -> None:
    """Check the implicit reward model likewise. reward_hf_config: its config.json."""
    placed = config.implicit_reward
    model = _completed(config, placed, reward_hf_config)
    violations = [rule(config, placed, model) for rule in _PLACED_MODEL_RULES]
    if score_head_of(model) is not None:
        raise UserError(
            f"{_model(config, placed)}: its architecture is {', '.join(model['architectures'])}, and token rewards "
            "come from log-probs; take a language model (...ForCausalLM)"
        )
    raise_all([*violations, knows_every_token(config, placed, hf_config, model)])


def model_config_is_complete(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    needed = ("intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers")
    missing = [name for name in needed if name not in hf]
    if not missing:
        return None
    lacking = ", ".join(missing)
    return f"{_model(config, placed)}: its config.json lacks {lacking}; take the config.json of the original model"


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
        return does_not_divide(f"{role}.layout.ep", ep, "experts", mixture.count, divisors(mixture.count))
    if ep == 1:
        return None
    return f"{role}.layout.ep={ep}: {_model(config, placed)} has no experts to share out; set {role}.layout.ep=1"


def expert_mlp_divides_by_etp(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    role = placed.section
    mixture = experts(hf)
    if mixture is None:
        return None
    layout, rows = placed.layout, mixture.intermediate
    key = f"{role}.layout.tp" if layout.etp is None else f"{role}.layout.etp"
    return does_not_divide(key, layout.expert_tp, "MLP rows of an expert", rows, divisors(rows))


def keys_of_experts_have_some(config: Config, hf: Mapping[str, Any]) -> str | None:
    chosen = config.actor.experts
    if experts(hf) is not None:
        return None
    lines = []
    if chosen.replay_routes:
        lines.append("actor.experts.replay_routes=true: {} has no experts; set actor.experts.replay_routes=false")
    if chosen.router != "free":
        lines.append("actor.experts.router=frozen: {} has no routers; set actor.experts.router=free")
    return "\n".join(line.format(_model(config, config.actor)) for line in lines) or None


def trust_region_is_of_a_dense_model(config: Config, hf: Mapping[str, Any]) -> str | None:
    limit = config.algorithm.trust_region.kl_limit
    if limit is None or experts(hf) is None:
        return None
    return (
        f"algorithm.trust_region.kl_limit={limit:g}: TRPO's products are differences of passes, and between two "
        f"of them {_model(config, config.actor)} may send a token to other experts; set "
        "algorithm.trust_region.kl_limit=null"
    )


def shared_experts_divide_by_tp(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    mixture = experts(hf)
    if mixture is None or not mixture.shared_intermediate:
        return None
    rows, tp = mixture.shared_intermediate, placed.layout.tp
    return does_not_divide(f"{placed.section}.layout.tp", tp, "MLP rows of the shared experts", rows, divisors(rows))


def experts_and_tensor_parallel_need_sequence_parallel(
    config: Config, placed: Placed, hf: Mapping[str, Any]
) -> str | None:
    role, layout = placed.section, placed.layout
    if layout.tp == 1 or layout.sequence_parallel or experts(hf) is None:
        return None
    return (
        f"{role}.layout.tp={layout.tp}, sequence_parallel=false: with experts every rank would dispatch all tokens, "
        f"which Megatron refuses; set {role}.layout.sequence_parallel=true"
    )


def layers_tile_the_stages(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    """Layers left by a first or last stage of its own size divide evenly over the other stages, at least one each."""
    role = placed.section
    layout, num_layers = placed.layout, hf["num_hidden_layers"]
    uneven = {name: layers for name, layers in layout.uneven_stages.items() if layers is not None}
    left, stages = num_layers - sum(uneven.values()), layout.pp - len(uneven)
    if (left == 0) if stages == 0 else (left >= stages and left % stages == 0):
        return None
    taken = "".join(f" - {layers}" for layers in uneven.values())
    keys = "".join(f", {name}={layers}" for name, layers in uneven.items())
    rest = f"{num_layers}{taken} = {left}" if uneven else f"{num_layers}"
    problem = (
        f"{role}.layout.pp={layout.pp}{keys}: {num_layers} layers do not tile the stages: {rest} layers over {stages} "
        f"{'other ' if uneven else ''}{'stage' if stages == 1 else 'stages'}"
    )
    if stages > 0:
        problem += f" ({quotient(left, stages)})"
    return f"{problem}; {_stage_remedy(layout.pp, num_layers)}"


def virtual_stages_tile_each_stage(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    """Each pipeline stage's layers divide evenly over its virtual stages."""
    role = placed.section
    layout, num_layers = placed.layout, hf["num_hidden_layers"]
    if layers_tile_the_stages(config, placed, hf) is not None:
        return None
    uneven = {name: layers for name, layers in layout.uneven_stages.items() if layers is not None}
    others = layout.pp - len(uneven)
    sizes = uneven | ({"the other stages": (num_layers - sum(uneven.values())) // others} if others else {})
    legal = divisors(gcd(*sizes.values()))
    lines = (
        does_not_divide(f"{role}.layout.vpp", layout.vpp, f"layers of a pipeline stage ({name})", layers, legal)
        for name, layers in sizes.items()
    )
    return next((line for line in lines if line is not None), None)


def kept_tokens_are_in_the_vocabulary(config: Config, hf: Mapping[str, Any]) -> str | None:
    top_k = config.rollout.top_k
    if top_k is None or top_k <= hf["vocab_size"]:
        return None
    return (
        f"rollout.top_k={top_k}: the model's vocabulary has {hf['vocab_size']} tokens; set rollout.top_k to at most "
        "that, or to null, which keeps all of them"
    )


def engine_heads_divide_by_tp(key: str, tp: int, hf: Mapping[str, Any]) -> str | None:
    return does_not_divide(key, tp, "attention heads", hf["num_attention_heads"], _engine_sizes(hf))


def engine_kv_heads_split_or_repeat(key: str, tp: int, hf: Mapping[str, Any]) -> str | None:
    """The engine shards KV heads over its ranks, or repeats each on several where there are more ranks than heads."""
    heads = kv_heads(hf)
    if tp % heads == 0:
        return None
    return does_not_divide(key, tp, "KV heads", heads, _engine_sizes(hf))


def engine_mlp_divides_by_tp(key: str, tp: int, hf: Mapping[str, Any]) -> str | None:
    if not _has_dense_layers(hf):
        return None
    return does_not_divide(key, tp, "MLP rows (intermediate_size)", hf["intermediate_size"], _engine_sizes(hf))


def engine_expert_mlp_divides_by_tp(key: str, tp: int, hf: Mapping[str, Any]) -> str | None:
    mixture = experts(hf)
    if mixture is None:
        return None
    return does_not_divide(key, tp, "MLP rows of an expert", mixture.intermediate, _engine_sizes(hf))


def engine_cuts_keep_blocks_whole(config: Config, hf: Mapping[str, Any]) -> str | None:
    """What an engine's rank has of a quantised tensor begins and ends where blocks do. vLLM refuses other cuts, but not
    in a layer that is put together from several tensors, whose scales would then be wrong."""
    tp = config.rollout.tp
    if config.rollout.quantization is None or tp not in _engine_sizes(hf):
        return None
    whole_experts = config.rollout.has_whole_experts
    odd = {what: size for what, size in _cut_sizes(hf, tp, whole_experts).items() if size % FP8_BLOCK}
    if not odd:
        return None
    legal = [
        size
        for size in _engine_sizes(hf)
        if not any(n % FP8_BLOCK for n in _cut_sizes(hf, size, whole_experts).values())
    ]
    remedy = f"choose rollout.tp from {listed(legal)}" if legal else "set rollout.quantization=null"
    if odd.keys() == {EXPERT_ROWS} and not whole_experts:
        remedy += ", or rollout.vllm_overrides={enable_expert_parallel: true}, which gives ranks whole experts"
    what, size = next(iter(odd.items()))
    return (
        f"rollout.quantization={config.rollout.quantization}: with rollout.tp={tp} an engine's rank has {size} {what}, "
        f"no multiple of {FP8_BLOCK}, and blocks cannot be cut; {remedy}"
    )


def _cut_sizes(hf: Mapping[str, Any], tp: int, whole_experts: bool) -> dict[str, int]:
    """Return how much an engine's rank has of what is cut or put together with others in a quantised layer, in
    words -> rows or columns."""
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
        sizes["rows of the queries' latent"] = latent.query_rank
    if tp > 1:
        sizes["query rows"] = heads // tp * (latent.content_dim + latent.position_dim)
        sizes["rows of keys and values"] = heads // tp * (latent.content_dim + latent.value_dim)
        sizes["columns of the output projection"] = heads // tp * latent.value_dim
    return sizes


def context_fits_the_positions(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    (key, context), positions = config.context_of(placed), hf["max_position_embeddings"]
    if context <= positions:
        return None
    return (
        f"{key}={context}: the model has {positions} positions (max_position_embeddings); set {key} to at most "
        f"{positions}"
    )


def attention_is_full(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    """An attention window, if there is one, is at least as long as the longest sample, so that it hides nothing."""
    window, (key, context) = attention_window(hf), config.context_of(placed)
    if window is None or context <= window:
        return None
    return (
        f"{key}={context}: with sliding_window {window} the model would not see the tokens before, which the trainer's "
        f"attention does; set {key} to at most {window}"
    )


def features_are_supported(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    found = unsupported(hf)
    if not found:
        return None
    return (
        f"{_model(config, placed)}: {' and '.join(found)} is not supported by this version; choose a model without it"
    )


def has_one_label(config: Config, placed: Placed, num_labels: int) -> str | None:
    if num_labels == 1:
        return None
    return (
        f"{_model(config, placed)}: it has {num_labels} labels (id2label), and a score is one number; take a "
        "classification checkpoint with num_labels=1"
    )


def knows_every_token(config: Config, placed: Placed, actor: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """A model that reads the ids of the actor's tokenizer and engine has a vocabulary of at least their size."""
    if model["vocab_size"] >= actor["vocab_size"]:
        return None
    return (
        f"{_model(config, placed)}: its vocab_size {model['vocab_size']} is below the actor's {actor['vocab_size']}, "
        "whose token ids it must read; take a model with the actor's tokenizer"
    )


def trained_classifier_scores_what_is_labelled(config: Config, kind: Kind) -> str | None:
    objective = config.algorithm.objective
    if objective.spec.classifier in (None, kind):
        return None
    names = {"sequence": "...ForSequenceClassification", "token": "...ForTokenClassification"}
    trained, given = names[objective.spec.classifier], names[kind]
    return (
        f"{_model(config, config.actor)}: it is a {given}, and algorithm.objective.name={objective.name} trains a "
        f"{trained}; take one of those, or a language model, which gets a new head"
    )


def steps_are_of_a_token_classifier(config: Config, kind: str) -> str | None:
    if config.reward_model.step_end is None or kind == "token":
        return None
    return (
        f"reward_model.step_end={config.reward_model.step_end!r}: {_model(config, config.reward_model)} scores whole "
        "samples (...ForSequenceClassification); set reward_model.step_end=null"
    )


def rewarded_tokens_are_the_sampled(config: Config, kind: str) -> str | None:
    """Scores of single tokens are of the sampled tokens: other tokens are no actions."""
    settings = config.reward_model
    outcome = settings.aggregation is not None or config.algorithm.advantage.estimator != "gae"
    if settings.input_format == "ids" or kind == "sequence" or outcome or settings.step_end is not None:
        return None
    return (
        f"reward_model.input_format={settings.input_format}: {_model(config, settings)} scores tokens of its own, whose positions "
        "are not those of the sampled ones that gae would reward; set reward_model.step_end, "
        "reward_model.aggregation=mean or reward_model.input_format=ids"
    )


def engine_routes_as_the_model(model: str, hf: Mapping[str, Any]) -> str | None:
    """The keys from which vLLM takes DeepSeek-V3's router are there; transformers neither reads nor writes them."""
    wanted = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    missing = [key for key in wanted if key not in hf]
    if hf["model_type"] != "deepseek_v3" or not missing:
        return None
    return (
        f"{model}: its config.json lacks {' and '.join(missing)}, and the engine would route by "
        f"softmax, without the bias; add {' and '.join(f'{key}: {wanted[key]}' for key in missing)}"
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
"""The rules between the keys of a model's section and its config.json."""

_ENGINE_RULES: tuple[Callable[[str, int, Mapping[str, Any]], str | None], ...] = (
    engine_heads_divide_by_tp,
    engine_kv_heads_split_or_repeat,
    engine_mlp_divides_by_tp,
    engine_expert_mlp_divides_by_tp,
)
"""The rules between a model and the key that gives the tensor parallel size of its engine."""


def _broken_by_engine(key: str, tp: int, model: str, hf: Mapping[str, Any]) -> list[str | None]:
    """Return the results of the engine's rules for a model. model: the key and value that name it."""
    return [*(rule(key, tp, hf) for rule in _ENGINE_RULES), engine_routes_as_the_model(model, hf)]


def _completed(config: Config, placed: Placed, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    try:
        model = completed(hf_config)
    except ValueError as error:
        raise UserError(f"{_model(config, placed)}: {error}") from None
    if violation := model_config_is_complete(config, placed, model):
        raise UserError(violation)
    return model


def _tensor_parallel(config: Config, placed: Placed, hf: Mapping[str, Any], what: str, number: int) -> str | None:
    role = placed.section
    rows = [hf["intermediate_size"]] if _has_dense_layers(hf) else []
    legal = divisors(gcd(hf["num_attention_heads"], kv_heads(hf), *rows))
    return does_not_divide(f"{role}.layout.tp", placed.layout.tp, what, number, legal)


def _has_dense_layers(hf: Mapping[str, Any]) -> bool:
    mixture = experts(hf)
    return mixture is None or not all(mixture.layers)


def _engine_sizes(hf: Mapping[str, Any]) -> list[int]:
    mixture, heads = experts(hf), kv_heads(hf)
    rows = [hf["intermediate_size"]] if _has_dense_layers(hf) else []
    rows += [mixture.intermediate] if mixture else []
    sizes = divisors(gcd(hf["num_attention_heads"], *rows))
    return [tp for tp in sizes if heads % tp == 0 or tp % heads == 0]


def _stage_remedy(pp: int, num_layers: int) -> str:
    remedy = f"choose pp from {listed(divisors(num_layers))} with first_stage_layers and last_stage_layers null"
    per_stage = -(-num_layers // pp)
    last = num_layers - (pp - 1) * per_stage
    if pp in divisors(num_layers) or last < 1:
        return remedy
    return f"{remedy}, or last_stage_layers={last} alone ({pp - 1} x {per_stage} + {last} = {num_layers})"


def _model(config: Config, placed: Placed) -> str:
    path = None if placed is config.actor else placed.path
    return f"model.path={config.model.path}" if path is None else f"{placed.section}.path={path}"
