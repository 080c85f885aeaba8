"""The algorithms of image models: rejected objectives and options, and options that have no effect."""

from __future__ import annotations

import pytest

from megarl.algorithms.registry import OBJECTIVES
from megarl.config.load import load
from megarl.config.schema import Config
from tests.paths import BASE

IMAGES = "rollout.engine=diffusers"
NFT = "algorithm.objective.name=diffusion_nft"


def recipe(*overrides: str, engine: str = IMAGES) -> Config:
    return load(BASE, ["model.path=m", "data.source=rows.jsonl", engine, *overrides])


def error_text(*overrides: str, engine: str = IMAGES) -> str:
    with pytest.raises(ValueError) as error:
        recipe(*overrides, engine=engine)
    return str(error.value)


@pytest.mark.parametrize("name", [name for name, spec in OBJECTIVES.items() if "steps" not in spec.actions])
def test_token_objectives_are_rejected_by_name(name):
    line, *others = error_text(f"algorithm.objective.name={name}", f"data.format={OBJECTIVES[name].rows[0]}").split(
        "\n"
    )
    remedies = "cispo or clip or diffusion_nft or flow_dppo or grpo_guard or sapo or unclipped"
    assert line.startswith(f"algorithm.objective.name={name}: ") or others
    assert f"but rollout.engine=diffusers. Fix: set algorithm.objective.name to {remedies}" in "\n".join(
        (line, *others)
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["batch={epochs: 2, prompts_per_step: 4, prompts_per_update: 2}", "actor.layout.dp=2"],
            "batch.epochs=2: with actor.layout.dp=2 and several updates per epoch, later epochs assign denoising steps",
        ),
        (
            ["logprob_check={action: mask, mask: sample}"],
            "logprob_check.mask=sample: with rollout.engine=diffusers, each denoising step is masked on its own",
        ),
        (
            ["rollout.denoising={num_steps: 6, sde_within: [0, 6]}"],
            "rollout.denoising.sde_within=[0, 6]: with rollout.denoising.num_steps=6, expected [first, end) with 0 <= "
            "first < end <= 5",
        ),
        (["rollout.denoising.sde_within=[3, 3]"], "rollout.denoising.sde_within=[3, 3]: with rollout.denoising."),
        (
            ["rollout.denoising={num_steps: 8, sde_steps: 5}"],
            "rollout.denoising.sde_steps=5: only steps 0 to 3 can be drawn. Fix: set rollout.denoising.sde_steps=4",
        ),
        (
            ["actor.optimizer.name=muon"],
            "actor.optimizer.name=muon: with rollout.engine=diffusers, Muon is tested only with language models. Fix",
        ),
        (["rollout.tp=2"], "rollout.tp=2: has no effect unless rollout.engine=vllm"),
        (
            ["rollout.kv_cache_on_update=recompute", "rollout.max_staleness=1"],
            "rollout.kv_cache_on_update=recompute: has no effect unless rollout.engine=vllm",
        ),
    ],
)
def test_other_keys_are_rejected(overrides, message):
    [line] = error_text(*overrides).splitlines()
    assert line.startswith(message)


def test_denoising_settings_require_images():
    message = error_text("rollout.denoising.num_steps=5", engine="rollout.engine=vllm")
    assert message.startswith("rollout.denoising.num_steps=5: has no effect unless rollout.engine=diffusers")


@pytest.mark.parametrize(
    ("keys", "trained", "windows"),
    [
        ("num_steps: 6", 5, {range(5)}),
        ("num_steps: 6, sde_within: [1, 4]", 3, {range(1, 4)}),
        ("num_steps: 6, sde_steps: 2", 2, {range(2), range(1, 3)}),
        ("num_steps: 6, sde_steps: 1, sde_within: [2, 5]", 1, {range(2, 3), range(3, 4), range(4, 5)}),
    ],
)
def test_windows_are_drawn_from_their_steps(keys, trained, windows):
    """By default all steps but the last are trained, and a window is drawn from the first half."""
    denoising = recipe(f"rollout.denoising={{{keys}}}").rollout.denoising
    assert denoising.num_trained == trained
    assert {denoising.sde_window(0, step) for step in range(60)} == windows


@pytest.mark.parametrize(
    ("keys", "trained", "within"),
    [
        ("num_steps: 6", 5, range(6)),
        ("num_steps: 6, sde_within: [1, 6]", 5, range(1, 6)),
        ("num_steps: 6, sde_steps: 2", 2, range(6)),
        ("num_steps: 6, sde_steps: 6", 6, range(6)),
        ("num_steps: 6, sde_steps: 1, sde_within: [2, 5]", 1, range(2, 5)),
    ],
)
def test_noise_levels_are_drawn_from_all_steps(keys, trained, within):
    """By default, each image is trained at all noise levels but one, as in DiffusionNFT's published code."""
    denoising = recipe(f"rollout.denoising={{{keys}}}", NFT).rollout.denoising
    assert denoising.num_trained == trained
    drawn = [denoising.noised_steps(0, f"1.0.{k}") for k in range(60)]
    assert {len({*steps}) for steps in drawn} == {trained}
    assert {step for steps in drawn for step in steps} == {*within}


@pytest.mark.parametrize(
    "key",
    [
        "algorithm.objective.step_weight=deviation",
        "algorithm.objective.imitation_coefficient=0.1",
        "algorithm.correction.old=rollout",
        "algorithm.correction.weight=token",
        "algorithm.correction.mask=token",
        "logprob_check.threshold=0.1",
        "logprob_check.limit=0.1",
        "logprob_check.action=stop",
        "rollout.denoising.kind=dance",
        "rollout.denoising.noise_level=0.3",
        "rollout.denoising.logprob=sum",
    ],
)
def test_keys_of_log_probs_are_rejected_without_them(key):
    assert error_text(key, NFT).startswith(f"{key}: has no effect unless algorithm.objective.name=clip (or another")
    recipe(key)


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [
        (["algorithm.objective={clip_low: 1.0e-4, clip_high: 1.0e-3}"], 1e-5),
        (["algorithm.objective={clip_low: 0.1, clip_high: 0.2}", "model.dtype=bfloat16"], 1e-4),
        (["algorithm.objective={clip_low: 0.1, clip_high: 0.2}", "rollout.denoising.logprob=sum"], 0.01),
        (["algorithm.objective.name=unclipped"], 1e-4),
        (["logprob_check.limit=0.5"], 0.5),
    ],
)
def test_agreement_limit_is_a_tenth_of_the_clip(overrides, limit):
    config = recipe(*overrides)
    assert config.agreement_limit == pytest.approx(limit)
    assert "logprob_check.limit=0.5" in overrides or config.tolerance.threshold == pytest.approx(10 * limit)


@pytest.mark.parametrize("name", [name for name, spec in OBJECTIVES.items() if "tokens" not in spec.actions])
def test_objectives_of_steps_require_images(name):
    expected = f"algorithm.objective.name={name}: trains on denoising steps, but rollout.engine=vllm samples tokens."
    assert error_text(f"algorithm.objective.name={name}", engine="rollout.engine=vllm").startswith(expected)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["algorithm.objective.name=gspo"], "needs a sequence-level ratio, which denoising steps do not have"),
        (["algorithm.objective.name=clip_cov"], "selects tokens"),
        (["algorithm.objective.name=dppo_tv"], "needs token probabilities"),
        (["algorithm.objective.name=dpo"], "trains on text"),
        (
            [NFT, "algorithm.kl.estimator=gaussian"],
            "algorithm.kl.estimator=gaussian: it is the KL of SDE steps, but algorithm.objective.name=diffusion_nft "
            "trains on images with new noise. Fix: set algorithm.kl.estimator=velocity",
        ),
        (
            [NFT, "rollout.denoising={num_steps: 6, sde_within: [0, 7]}"],
            "rollout.denoising.sde_within=[0, 7]: with rollout.denoising.num_steps=6, expected [first, end) with 0 <= "
            "first < end <= 6. Fix: set rollout.denoising.sde_within=[0, 6]",
        ),
        (
            [NFT, "rollout.denoising={num_steps: 6, sde_steps: 7}"],
            "rollout.denoising.sde_steps=7: only steps 0 to 5 can be drawn. Fix: set rollout.denoising.sde_steps=6",
        ),
        (
            ["algorithm.objective.name=grpo_guard", "algorithm.correction.old=rollout"],
            "algorithm.correction.old=rollout: algorithm.objective.name=grpo_guard needs the old policy's velocities",
        ),
        (["algorithm.advantage.estimator=gae"], "denoising steps have no critic, but rollout.engine=diffusers."),
        (["algorithm.advantage.estimator=remax"], "images have no greedy sample, but rollout.engine=diffusers."),
        (["algorithm.kl.estimator=k3"], "algorithm.kl.estimator=k3: estimates the KL from log-probs, but the KL of"),
        (["algorithm.kl.placement=reward"], "Fix: set algorithm.kl.placement=loss"),
        (
            ["algorithm.objective.entropy_coefficient=0.1"],
            "algorithm.objective.entropy_coefficient=0.1: with rollout.engine=diffusers, the entropy of a denoising "
            "step does not depend on the policy. Fix: set algorithm.objective.entropy_coefficient=0.0",
        ),
        (["algorithm.objective.aggregation=sequence_mean_over_max_tokens"], "images have no maximum length. Fix: set"),
        (["algorithm.correction.weight=sequence"], "Fix: set algorithm.correction.weight=null"),
        (["algorithm.correction.mask=geometric"], "Fix: set algorithm.correction.mask=null"),
        (["algorithm.objective.skip_truncated=true"], "has no effect unless rollout.engine=vllm"),
        (["algorithm.kl.level=sequence"], "has no effect unless rollout.engine=vllm"),
        (["algorithm.kl.straight_through=true"], "has no effect unless rollout.engine=vllm"),
        (["algorithm.kl.limit=10.0"], "has no effect unless rollout.engine=vllm"),
        (
            ["algorithm.advantage={std: none, std_over: step}"],
            "algorithm.advantage.std_over=step: has no effect with algorithm.advantage.std=none. Fix: set",
        ),
        (
            ["algorithm.advantage={credit: reward_to_go, std_over: step}"],
            "algorithm.advantage.std_over=step: with algorithm.advantage.credit=reward_to_go, token rewards",
        ),
    ],
)
def test_invalid_option_causes_one_error(overrides, line):
    text = error_text(*overrides)
    assert line in text and "\n" not in text


def test_trust_region_is_rejected():
    keys = "algorithm.objective.name=unclipped", "algorithm.trust_region.kl_limit=0.01", "model.dtype=float32"
    line = "algorithm.trust_region.kl_limit=0.01: with rollout.engine=diffusers, TRPO's divergence is defined for"
    assert error_text(*keys).startswith(line)


@pytest.mark.parametrize("key", ["algorithm.objective.step_weight=deviation", "algorithm.kl.estimator=gaussian"])
def test_image_options_are_rejected_for_text(key):
    assert error_text(key, engine="rollout.engine=vllm").startswith(f"{key}: ")
    recipe(key)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.advantage={std: population, std_epsilon: 1.0e-4, limit: 5.0, std_over: step}"],
        ["algorithm.objective={name: grpo_guard, step_weight: inverse_interval}"],
        ["algorithm.correction={weight: token, mask: token}"],
        ["algorithm.correction.old=rollout"],
        ["algorithm.advantage.estimator=rloo"],
        [NFT, "algorithm.kl.coefficient=0.01", "logprob_check.canaries=refits"],
        [NFT, "rollout.max_staleness=1"],
        ["algorithm.advantage.estimator=reinforce_plus_plus"],
    ],
)
def test_supported_options_are_accepted(overrides):
    recipe(*overrides)


def test_kl_is_that_of_the_steps_by_default():
    assert recipe(NFT).algorithm.kl.estimator == "velocity"
    assert recipe(NFT).algorithm.kl_metric == "kl/loss_token_velocity"
    assert recipe().algorithm.kl.estimator == "gaussian" and recipe().algorithm.kl_metric == "kl/loss_token_gaussian"
    assert recipe(engine="rollout.engine=vllm").algorithm.kl.estimator == "k3"
    assert recipe("algorithm.kl.estimator=velocity").algorithm.kl.estimator == "velocity"
