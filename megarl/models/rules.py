"""Check the config and a model's config.json for compatibility. Rules are generators, as in `megarl.config.rules`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import gcd
from typing import Any

from megarl.config.divisors import divisibility_error, divisors, listed, quotient
from megarl.config.model_schema import Critic, ImplicitReward, Placed, RewardModel
from megarl.config.schema import Config
from megarl.config.violations import raise_all
from megarl.core.errors import UserError
from megarl.models.classifier import Kind, score_head_of
from megarl.models.denoiser import DenoiserShape, is_denoiser
from megarl.models.huggingface import (
    FP8_BLOCK,
    attention_window,
    completed,
    experts,
    kv_heads,
    latent_attention,
    linear_attention,
    replicates_kv_heads,
)
from megarl.models.mtp import why_no_mtp
from megarl.models.unsupported import unsupported

EXPERT_ROWS = "MLP rows of an expert"


def check_model(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Check the config against the actor's config.json. Raise a UserError if a rule is violated. The message has one
    line per violated rule."""
    actor = config.actor
    if is_denoiser(hf_config) != config.samples_images:
        engine, kind = ("diffusers", "an image model") if is_denoiser(hf_config) else ("vllm", "a language model")
        raise UserError(
            f"rollout.engine={config.rollout.engine}: {_model(config, actor)} is {kind}. Fix: set "
            f"rollout.engine={engine}, or use another model"
        )
    if config.samples_images:
        raise_all(_broken_by_denoiser(config, DenoiserShape.of(hf_config)))
        return
    model = _completed(config, actor, hf_config)
    violations = [*_violations(config, actor, model), *expert_keys_require_experts(config, model)]
    violations += trust_region_requires_dense_model(config, model)
    violations += delta_nets_are_not_quantized(config, model)
    violations += model_has_mtp(config, model)
    if not config.is_offline:
        violations += _broken_by_engine("rollout.tp", config.rollout.tp, _model(config, actor), model)
        violations += top_k_fits_the_vocabulary(config, model)
        violations += engine_shards_keep_blocks_whole(config, model)
    elif head := score_head_of(model):
        violations += has_one_label(config, actor, head.num_labels) if config.trains_reward_model else ()
        violations += classifier_kind_fits_objective(config, head.kind)
    raise_all(violations)


def model_has_mtp(config: Config, hf: Mapping[str, Any]) -> Iterator[str]:
    if config.actor.has_mtp and (reason := why_no_mtp(hf)) is not None:
        yield (
            f"actor.mtp.loss_coefficient={config.actor.mtp.loss_coefficient}: {_model(config, config.actor)}: "
            f"{reason}. Fix: set actor.mtp.loss_coefficient=null"
        )


def check_images(config: Config, shape: DenoiserShape, pixels_per_latent: int) -> None:
    """Check the size of images against an image model. Raise a UserError as in `check_model`.

    Args:
        pixels_per_latent: height and width in pixels of one latent of the VAE.
    """
    denoising = config.rollout.denoising
    size = denoising.height, denoising.width
    raise_all(
        [
            *images_fit_the_positions(*size, shape, pixels_per_latent),
            *microbatch_holds_a_denoising_step(config, shape, pixels_per_latent),
        ]
    )


def check_critic_model(config: Config, hf_config: Mapping[str, Any], critic_hf_config: Mapping[str, Any]) -> None:
    """Check the config against the config.json of the critic's initial model, as in `check_model`."""
    critic = _completed(config, config.critic, critic_hf_config)
    head = score_head_of(critic)
    labels = () if head is None else has_one_label(config, config.critic, head.num_labels)
    covered = vocabulary_covers_actors(config, config.critic, hf_config, critic)
    raise_all([*_violations(config, config.critic, critic), *labels, *covered])


def check_reward_model(config: Config, hf_config: Mapping[str, Any], reward_hf_config: Mapping[str, Any]) -> None:
    """Check the config against the reward model's config.json, as in `check_model`."""
    placed = config.reward_model
    reward = _completed(config, placed, reward_hf_config)
    if placed.engine == "megatron":
        violations = _violations(config, placed, reward)
    else:
        violations = _broken_by_engine("reward_model.layout.tp", placed.layout.tp, _model(config, placed), reward)
        violations += context_fits_the_positions(config, placed, reward)
        violations += features_are_supported(config, placed, reward)
    head = score_head_of(reward)
    architectures = ", ".join(reward.get("architectures") or ["none"])
    if placed.judges and head is not None:
        raise UserError(
            f"{_model(config, placed)}: its architecture is {architectures}, but reward_model.input_format=question "
            "requires a language model. Fix: use a ...ForCausalLM model, or set reward_model.input_format=ids, text "
            "or chat"
        )
    if not placed.judges and head is None:
        raise UserError(
            f"{_model(config, placed)}: its architecture is {architectures}, which has no score head. Fix: use a "
            "classification checkpoint (...ForSequenceClassification or ...ForTokenClassification), or set "
            "reward_model.input_format=question to use it as a judge"
        )
    if head is not None:
        violations += has_one_label(config, placed, head.num_labels)
        violations += step_end_requires_token_classifier(config, head.kind)
        violations += token_scores_require_sampled_tokens(config, head.kind)
    if placed.input_format == "ids":
        violations += vocabulary_covers_actors(config, placed, hf_config, reward)
    raise_all(violations)


def check_implicit_reward_model(
    config: Config, hf_config: Mapping[str, Any], reward_hf_config: Mapping[str, Any]
) -> None:
    """Check the config against the implicit reward model's config.json, as in `check_model`."""
    placed = config.implicit_reward
    model = _completed(config, placed, reward_hf_config)
    if score_head_of(model) is not None:
        raise UserError(
            f"{_model(config, placed)}: its architecture is {', '.join(model['architectures'])}, but the log-probs for "
            "token rewards require a language model. Fix: use a ...ForCausalLM model"
        )
    covered = vocabulary_covers_actors(config, placed, hf_config, model)
    raise_all([*_violations(config, placed, model), *covered])


def sizes_divide_by_tp(config: Config, placed: Placed, hf: Mapping[str, Any]) -> Iterator[str]:
    sizes = {"attention heads": hf["num_attention_heads"], "KV heads": kv_heads(hf)} | _dense_rows(hf)
    legal = divisors(gcd(*sizes.values()))
    yield from _indivisible(f"{placed.section}.layout.tp", placed.layout.tp, sizes, legal)


def delta_net_heads_divide_by_tp_and_cp(config: Config, placed: Placed, hf: Mapping[str, Any]) -> Iterator[str]:
    """Require that the key heads of gated delta nets split evenly: context-parallel ranks exchange tokens for heads."""
    linear, layout, role = linear_attention(hf), placed.layout, placed.section
    ranks = layout.tp * layout.cp
    if linear is not None and linear.key_heads % ranks:
        yield (
            f"{role}.layout.tp={layout.tp}, cp={layout.cp}: {linear.key_heads} key heads of the gated delta nets "
            f"cannot be split over tp x cp = {layout.tp} x {layout.cp} = {ranks} ranks. Fix: set {role}.layout.tp and "
            f"{role}.layout.cp so that their product is {listed(divisors(linear.key_heads))}"
        )


def experts_divide_by_ep(config: Config, placed: Placed, hf: Mapping[str, Any]) -> Iterator[str]:
    key, ep, mixture = f"{placed.section}.layout.ep", placed.layout.ep, experts(hf)
    if mixture is not None:
        yield from _indivisible(key, ep, {"experts": mixture.count}, divisors(mixture.count))
    elif ep != 1:
        yield f"{key}={ep}: {_model(config, placed)} has no experts. Fix: set {key}=1"


def expert_mlps_divide_by_tp(config: Config, placed: Placed, hf: Mapping[str, Any]) -> Iterator[str]:
    mixture, layout, section = experts(hf), placed.layout, placed.section
    if mixture is not None:
        rows, shared = mixture.intermediate, mixture.shared_intermediate
        key = f"{section}.layout.tp" if layout.etp is None else f"{section}.layout.etp"
        yield from _indivisible(key, layout.expert_tp, {EXPERT_ROWS: rows}, divisors(rows))
        sizes = {"MLP rows of the shared experts": shared} if shared else {}
        yield from _indivisible(f"{section}.layout.tp", layout.tp, sizes, divisors(shared))


def expert_biases_require_whole_experts(config: Config, placed: Placed, hf: Mapping[str, Any]) -> Iterator[str]:
    """Require etp=1 for experts with biases: every rank with a share of an expert would add the output's bias."""
    mixture, layout, section = experts(hf), placed.layout, placed.section
    if mixture is not None and mixture.is_interleaved and layout.expert_tp > 1:
        parallel = f" and {section}.layout.ep to at least 2, or set {section}.layout.tp=1" if layout.ep == 1 else ""
        yield (
            f"{section}.layout.etp={layout.expert_tp}: the experts have biases, which Megatron does not support in "
            f"sharded experts. Fix: set {section}.layout.etp=1{parallel}"
        )


def expert_keys_require_experts(config: Config, hf: Mapping[str, Any]) -> Iterator[str]:
    keys, model = config.actor.experts, _model(config, config.actor)
    if keys.replay_routes and experts(hf) is None:
        yield f"actor.experts.replay_routes=true: {model} has no experts. Fix: set actor.experts.replay_routes=false"
    if keys.router != "free" and experts(hf) is None:
        yield f"actor.experts.router=frozen: {model} has no routers. Fix: set actor.experts.router=free"


def trust_region_requires_dense_model(config: Config, hf: Mapping[str, Any]) -> Iterator[str]:
    limit = config.algorithm.trust_region.kl_limit
    if limit is not None and experts(hf) is not None:
        yield (
            f"algorithm.trust_region.kl_limit={limit:g}: TRPO computes differences between passes, but "
            f"{_model(config, config.actor)} may route a token to different experts in each pass. Fix: set "
            "algorithm.trust_region.kl_limit=null"
        )


def experts_and_tensor_parallel_need_sequence_parallel(
    config: Config, placed: Placed, hf: Mapping[str, Any]
) -> Iterator[str]:
    role, layout = placed.section, placed.layout
    if layout.tp > 1 and not layout.sequence_parallel and experts(hf) is not None:
        yield (
            f"{role}.layout.tp={layout.tp}, sequence_parallel=false: every rank would dispatch all tokens to the "
            f"experts, which Megatron rejects. Fix: set {role}.layout.sequence_parallel=true"
        )


def layers_tile_the_stages(config: Config, placed: Placed, hf: Mapping[str, Any]) -> Iterator[str]:
    """Require that the remaining layers split evenly over the stages without an explicit size, at least one each, and
    that the layers of each stage split evenly over its virtual stages."""
    role, layout, num_layers = placed.section, placed.layout, hf["num_hidden_layers"]
    uneven = {name: layers for name, layers in layout.uneven_stages.items() if layers is not None}
    rest, stages = num_layers - sum(uneven.values()), layout.pp - len(uneven)
    if (rest == 0) if stages == 0 else (rest >= stages and rest % stages == 0):
        sizes = uneven | ({"the other stages": rest // stages} if stages else {})
        named = {f"layers of a pipeline stage ({name})": layers for name, layers in sizes.items()}
        legal = divisors(gcd(*sizes.values()))
        yield from _indivisible(f"{role}.layout.vpp", layout.vpp, named, legal)[:1]
        return
    subtracted = "".join(f" - {layers}" for layers in uneven.values())
    keys = "".join(f", {name}={layers}" for name, layers in uneven.items())
    difference = f"{num_layers}{subtracted} = {rest}" if uneven else f"{num_layers}"
    arithmetic = f" ({quotient(rest, stages)})" if stages > 0 else ""
    yield (
        f"{role}.layout.pp={layout.pp}{keys}: {num_layers} layers cannot be split evenly over the stages: {difference} "
        f"layers over {stages} {'other ' if uneven else ''}{'stage' if stages == 1 else 'stages'}{arithmetic}. Fix: "
        f"{_stage_fix(layout.pp, num_layers)}"
    )


def top_k_fits_the_vocabulary(config: Config, hf: Mapping[str, Any]) -> Iterator[str]:
    top_k = config.rollout.top_k
    if top_k is not None and top_k > hf["vocab_size"]:
        yield (
            f"rollout.top_k={top_k}: the model's vocabulary has {hf['vocab_size']} tokens. Fix: set rollout.top_k to "
            f"at most {hf['vocab_size']}, or to null to keep all tokens"
        )


def engine_sizes_divide_by_tp(key: str, tp: int, hf: Mapping[str, Any]) -> Iterator[str]:
    """Require that the engine can split the model over its ranks. With more ranks than KV heads, it replicates KV
    heads, except for gpt-oss."""
    mixture, heads = experts(hf), kv_heads(hf)
    is_divided = tp % heads != 0 or not replicates_kv_heads(hf["model_type"])
    sizes = {"attention heads": hf["num_attention_heads"]} | ({"KV heads": heads} if is_divided else {})
    sizes |= _dense_rows(hf) | ({EXPERT_ROWS: mixture.intermediate} if mixture else {}) | _delta_net_heads(hf)
    yield from _indivisible(key, tp, sizes, _engine_sizes(hf))


def engine_shards_keep_blocks_whole(config: Config, hf: Mapping[str, Any]) -> Iterator[str]:
    """Require that the shards of a quantized tensor start and end at block boundaries. vLLM rejects shards that split
    blocks, except in layers that merge several tensors, where it uses incorrect scales."""
    tp = config.rollout.tp
    if config.rollout.quantization is None or tp not in _engine_sizes(hf):
        return
    whole_experts = config.rollout.has_whole_experts
    split = {size: _split_blocks(hf, size, whole_experts) for size in (tp, *_engine_sizes(hf))}
    if split[tp]:
        legal = [size for size in _engine_sizes(hf) if not split[size]]
        fix = f"set rollout.tp to {listed(legal)}" if legal else "set rollout.quantization=null"
        if split[tp].keys() == {EXPERT_ROWS} and not whole_experts:
            fix += (
                ", or set rollout.vllm_overrides={enable_expert_parallel: true} so that each expert stays on one rank"
            )
        name, size = next(iter(split[tp].items()))
        yield (
            f"rollout.quantization={config.rollout.quantization}: with rollout.tp={tp} an engine rank has {size} "
            f"{name}, which is not a multiple of the block size {FP8_BLOCK}. Fix: {fix}"
        )


def delta_nets_are_not_quantized(config: Config, hf: Mapping[str, Any]) -> Iterator[str]:
    if config.rollout.quantization is not None and linear_attention(hf) is not None:
        yield (
            f"rollout.quantization={config.rollout.quantization}: vLLM's gated delta nets keep the projection to step "
            "sizes and decays unquantized, which refits do not support. Fix: set rollout.quantization=null"
        )


def _split_blocks(hf: Mapping[str, Any], tp: int, whole_experts: bool) -> dict[str, int]:
    """Return the sizes of an engine rank's quantized shards that are not whole blocks: description -> rows or columns.
    Only shards that are split between ranks or merged with others count."""
    return {name: size for name, size in _shard_sizes(hf, tp, whole_experts).items() if size % FP8_BLOCK}


def _shard_sizes(hf: Mapping[str, Any], tp: int, whole_experts: bool) -> dict[str, int]:
    mixture, latent = experts(hf), latent_attention(hf)
    sizes = {"MLP rows": hf["intermediate_size"] // tp} if _dense_rows(hf) else {}
    if mixture is not None:
        sizes[EXPERT_ROWS] = mixture.intermediate // (1 if whole_experts else tp)
        sizes["MLP rows of the shared experts"] = mixture.shared_intermediate // tp
    heads = hf["num_attention_heads"]
    if latent is None:
        head_dim = hf["head_dim"] or hf["hidden_size"] // heads
        keys = max(1, kv_heads(hf) // tp)
        return sizes | {"query rows": heads // tp * head_dim, "key rows": keys * head_dim}
    if latent.query_rank is not None:
        sizes["rows of the query latent"] = latent.query_rank
    if tp > 1:
        sizes["query rows"] = heads // tp * (latent.content_dim + latent.position_dim)
        sizes["key and value rows"] = heads // tp * (latent.content_dim + latent.value_dim)
        sizes["columns of the output projection"] = heads // tp * latent.value_dim
    return sizes


def context_fits_the_positions(config: Config, placed: Placed, hf: Mapping[str, Any]) -> Iterator[str]:
    (key, context), positions = config.context_of(placed), hf["max_position_embeddings"]
    if context > positions:
        yield (
            f"{key}={context}: the model has {positions} positions (max_position_embeddings). Fix: set {key} to at "
            f"most {positions}"
        )


def attention_is_full(config: Config, placed: Placed, hf: Mapping[str, Any]) -> Iterator[str]:
    """Require that the attention window, if any, covers the longest sample, so that attention is full."""
    window, (key, context) = attention_window(hf), config.context_of(placed)
    if window is not None and context > window:
        yield (
            f"{key}={context}: it exceeds the model's sliding_window={window}, but the trainer computes full "
            f"attention. Fix: set {key} to at most {window}"
        )


def features_are_supported(config: Config, placed: Placed, hf: Mapping[str, Any]) -> Iterator[str]:
    features = unsupported(hf)
    if features:
        yield f"{_model(config, placed)}: megarl does not support {' and '.join(features)}. Fix: use another model"


def images_fit_the_positions(height: int, width: int, shape: DenoiserShape, pixels_per_latent: int) -> Iterator[str]:
    pixels = pixels_per_latent * shape.patch
    for name, size, limit in zip(("height", "width"), (height, width), shape.image_limit, strict=True):
        if size % pixels or not 0 < size <= limit * pixels:
            key = f"rollout.denoising.{name}"
            yield (
                f"{key}={size}: expected a positive multiple of {pixels_per_latent} pixels per latent x {shape.patch} "
                f"latents per token = {pixels}, up to {limit} tokens x {pixels} = {limit * pixels}. Fix: set "
                f"{key}={min(limit, max(1, size // pixels)) * pixels}"
            )


def microbatch_holds_a_denoising_step(config: Config, shape: DenoiserShape, pixels_per_latent: int) -> Iterator[str]:
    """A denoising step has a document for each branch of the guidance. Context-parallel ranks share its tokens."""
    denoising, budget, cp = config.rollout.denoising, config.actor.tokens_per_microbatch, config.actor.layout.cp
    pixels = pixels_per_latent * shape.patch
    image = shape.padded(-(-denoising.height // pixels) * -(-denoising.width // pixels))
    branches = [shape.max_caption_tokens, *([] if denoising.guidance == 1 else [shape.caption_tokens(1)])]
    needed = sum(image + caption for caption in branches)
    if budget * cp >= needed:
        return
    sums = " and ".join(f"{image} image + {caption} caption" for caption in branches)
    ranks, share = (f" on actor.layout.cp={cp} ranks", f"{budget} x {cp}") if cp > 1 else ("", f"{budget}")
    yield (
        f"actor.tokens_per_microbatch={budget}: a denoising step can have {sums} = {needed} tokens{ranks} and is never "
        f"split over microbatches ({share} < {needed}). Fix: set actor.tokens_per_microbatch to at least "
        f"{-(-needed // cp)}"
    )


def has_one_label(config: Config, placed: Placed, num_labels: int) -> Iterator[str]:
    if num_labels != 1:
        yield (
            f"{_model(config, placed)}: the model has {num_labels} labels (id2label), but a score is a single number. "
            "Fix: use a classification checkpoint with num_labels=1"
        )


def vocabulary_covers_actors(
    config: Config, placed: Placed, actor: Mapping[str, Any], model: Mapping[str, Any]
) -> Iterator[str]:
    """Require that the vocabulary of a model that processes the actor's token ids is not smaller than the actor's."""
    if model["vocab_size"] < actor["vocab_size"]:
        yield (
            f"{_model(config, placed)}: its vocab_size={model['vocab_size']} is smaller than the actor's "
            f"vocab_size={actor['vocab_size']}, but it reads the actor's token ids. Fix: use a model with the actor's "
            "tokenizer"
        )


def classifier_kind_fits_objective(config: Config, kind: Kind) -> Iterator[str]:
    objective = config.algorithm.objective
    names = {"sequence": "...ForSequenceClassification", "token": "...ForTokenClassification"}
    expected = objective.spec.classifier
    if expected not in (None, kind):
        yield (
            f"{_model(config, config.actor)}: its architecture is {names[kind]}, but "
            f"algorithm.objective.name={objective.name} trains {names[expected]}. Fix: use a {names[expected]} model, "
            "or a language model, to which megarl adds a new head"
        )


def step_end_requires_token_classifier(config: Config, kind: str) -> Iterator[str]:
    if config.reward_model.step_end is not None and kind != "token":
        yield (
            f"reward_model.step_end={config.reward_model.step_end!r}: {_model(config, config.reward_model)} scores "
            "whole samples (...ForSequenceClassification). Fix: set reward_model.step_end=null"
        )


def token_scores_require_sampled_tokens(config: Config, kind: str) -> Iterator[str]:
    """Require sampled tokens for token-level scores, because only sampled tokens are actions."""
    settings = config.reward_model
    per_token = settings.aggregation is None and config.algorithm.advantage.estimator == "gae"
    if settings.input_format != "ids" and kind != "sequence" and per_token and settings.step_end is None:
        yield (
            f"reward_model.input_format={settings.input_format}: {_model(config, settings)} scores the tokens of its "
            "own tokenizer, but gae needs scores of the sampled tokens. Fix: set reward_model.step_end, "
            "reward_model.aggregation=mean or reward_model.input_format=ids"
        )


def engine_router_keys_are_present(model: str, hf: Mapping[str, Any]) -> Iterator[str]:
    """Require the keys for DeepSeek-V3's router that vLLM reads from config.json. transformers does not write them. For
    GLM-4.5, vLLM does not read them."""
    required = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    missing = [key for key in required if key not in hf]
    if latent_attention(hf) and missing:
        yield (
            f"{model}: its config.json lacks {' and '.join(missing)}, so the engine would route with softmax and "
            f"without the bias. Fix: add {' and '.join(f'{key}: {required[key]}' for key in missing)} to config.json"
        )


_PLACED_MODEL_RULES = (
    sizes_divide_by_tp,
    delta_net_heads_divide_by_tp_and_cp,
    experts_divide_by_ep,
    expert_mlps_divide_by_tp,
    expert_biases_require_whole_experts,
    experts_and_tensor_parallel_need_sequence_parallel,
    layers_tile_the_stages,
    context_fits_the_positions,
    attention_is_full,
    features_are_supported,
)
"""Rules for a model's config section and its config.json."""


def _violations(config: Config, placed: Placed, hf: Mapping[str, Any]) -> list[str]:
    return [line for rule in _PLACED_MODEL_RULES for line in rule(config, placed, hf)]


def _broken_by_denoiser(config: Config, shape: DenoiserShape) -> list[str]:
    """Return the violations of the rules on layouts, for which only the sizes of a model matter."""
    sizes = {
        "model_type": shape.model_type,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
    }
    rules = sizes_divide_by_tp, experts_divide_by_ep, layers_tile_the_stages
    return [line for rule in rules for line in rule(config, config.actor, sizes)]


def _broken_by_engine(key: str, tp: int, model: str, hf: Mapping[str, Any]) -> list[str]:
    """Return the violations of an engine's rules. model: config key and value of the model's path."""
    return [*engine_sizes_divide_by_tp(key, tp, hf), *engine_router_keys_are_present(model, hf)]


def _completed(config: Config, placed: Placed, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    try:
        model = completed(hf_config)
    except ValueError as error:
        raise UserError(f"{_model(config, placed)}: {error}") from None
    needed = ("intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers")
    if missing := [name for name in needed if name not in model]:
        raise UserError(
            f"{_model(config, placed)}: its config.json lacks {', '.join(missing)}. Fix: use the config.json of the "
            "original model"
        )
    return model


def _indivisible(key: str, divisor: int, sizes: Mapping[str, int], legal: Iterable[int]) -> list[str]:
    """Return an error for each size that is not divisible by the divisor. `sizes` maps descriptions to sizes."""
    lines = [divisibility_error(key, divisor, noun, number, legal) for noun, number in sizes.items()]
    return [line for line in lines if line is not None]


def _dense_rows(hf: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of rows in a dense MLP, by description; empty if all layers have experts."""
    mixture = experts(hf)
    has_dense_layers = mixture is None or not all(mixture.layers)
    return {"MLP rows (intermediate_size)": hf["intermediate_size"]} if has_dense_layers else {}


def _delta_net_heads(hf: Mapping[str, Any]) -> dict[str, int]:
    linear = linear_attention(hf)
    return {"key heads of the gated delta nets": linear.key_heads} if linear else {}


def _engine_sizes(hf: Mapping[str, Any]) -> list[int]:
    mixture, heads = experts(hf), kv_heads(hf)
    rows = [*_dense_rows(hf).values(), *([mixture.intermediate] if mixture else []), *_delta_net_heads(hf).values()]
    sizes, has_copies = divisors(gcd(hf["num_attention_heads"], *rows)), replicates_kv_heads(hf["model_type"])
    return [tp for tp in sizes if heads % tp == 0 or (has_copies and tp % heads == 0)]


def _stage_fix(pp: int, num_layers: int) -> str:
    fix = f"set pp to {listed(divisors(num_layers))} with first_stage_layers=null and last_stage_layers=null"
    per_stage = -(-num_layers // pp)
    last = num_layers - (pp - 1) * per_stage
    if pp in divisors(num_layers) or last < 1:
        return fix
    return f"{fix}, or last_stage_layers={last} alone ({pp - 1} x {per_stage} + {last} = {num_layers})"


def _model(config: Config, placed: Placed) -> str:
    path = placed.path if isinstance(placed, Critic | ImplicitReward | RewardModel) else None
    return f"model.path={config.model.path}" if path is None else f"{placed.section}.path={path}"
