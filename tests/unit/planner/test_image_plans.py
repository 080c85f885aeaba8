"""Plans for image models: operations, memory, rollouts and messages, compared with diffusers' classes and closed
forms."""

from __future__ import annotations

import json
from math import ceil
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL
from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, Qwen3Config, Qwen3Model, T5Config, T5EncoderModel
from typer.testing import CliRunner

from megarl.cli import app
from megarl.cluster.memory.parameters import ModelParameters, Models
from megarl.cluster.memory.shared_gpu import fullest_phase
from megarl.core.errors import UserError
from megarl.models import denoiser
from megarl.models.denoiser import DenoiserShape
from megarl.models.flops import velocity_flops
from megarl.planner.hardware import DENSE_SHARE, GIB, read_cluster
from megarl.planner.image_rollout_time import DECODER_FLOPS
from megarl.planner.layouts import broken_rules
from megarl.planner.plan import Planned, plan_recipe, simulate_steps
from megarl.planner.plan_page import render
from megarl.planner.plan_text import table
from megarl.planner.refit_preview import preview_refit
from megarl.planner.step_plan import StepPlan, plan_step
from megarl.planner.workload import workload_of
from megarl.resharding.planning.preview import reshard
from tests.published_models import SD35_LARGE, SD35_MEDIUM, Z_IMAGE, Z_IMAGE_PARAMETERS
from tests.tiny_denoiser import MODELS
from tests.unit.planner.plan_cases import layout_keys, recipe

SHAPE = DenoiserShape.of(Z_IMAGE)
SAMPLING, TRAINING = "while the engine samples", "while the actor trains"
TINY = dict(
    _class_name=denoiser.Z_IMAGE,
    in_channels=4,
    dim=48,
    n_layers=3,
    n_refiner_layers=2,
    n_heads=2,
    n_kv_heads=2,
    cap_feat_dim=20,
    axes_dims=[8, 8, 8],
    axes_lens=[256, 32, 32],
)
BATCH = ("batch.prompts_per_step=32", "batch.samples_per_prompt=24", "batch.prompts_per_update=16")
ENGINE = ("rollout.engine=diffusers", "rollout.replicas=8")
KEYS = (*BATCH, *ENGINE, "model.dtype=bfloat16", "actor.tokens_per_microbatch=8192")


def image_recipe(*overrides: str):
    return recipe(*KEYS, *overrides)


def plan_of(*overrides: str, gpus: str = "8xH100", captions: float | None = None) -> StepPlan:
    config, models = (
        image_recipe(*overrides),
        Models.of({"actor": Z_IMAGE}, lora=image_recipe(*overrides).actor.adapters),
    )
    assert broken_rules(config, Z_IMAGE) == []
    workload = workload_of(config, models.actor.shape, captions)
    return plan_step(config, models, workload, read_cluster(gpus))


def planned(folder: Path, *overrides: str, as_is: bool = True, **lengths: float) -> Planned:
    (folder / "config.json").write_text(json.dumps(Z_IMAGE))
    config = image_recipe(f"model.path={folder}", *overrides)
    return plan_recipe(config, read_cluster("8xH100"), as_is, **lengths)


@pytest.mark.parametrize(("height", "width", "caption"), [(16, 16, 32), (20, 12, 5), (8, 32, 70)])
def test_flops_match_torch(height, width, caption):
    """Images have 64, 60 and 64 tokens, and captions 32, 5 and 70, before padding to multiples of 32."""
    model = ZImageTransformer2DModel.from_config(TINY).eval()
    inputs = [torch.randn(4, 1, height, width)], torch.tensor([0.5]), [torch.randn(caption, 20)]
    # Use the math backend, because torch's counter does not count the fused CPU attention.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(*inputs, return_dict=False, patch_size=2)
    image_tokens, caption_tokens = 32 * ceil(height * width / 4 / 32), 32 * ceil(caption / 32)
    assert velocity_flops(DenoiserShape.of(TINY), image_tokens, caption_tokens) == counter.get_total_flops()


@pytest.mark.parametrize(("height", "width", "caption"), [(16, 16, 32), (20, 12, 5)])
@pytest.mark.parametrize(
    "changes", [{}, {"qk_norm": None, "dual_attention_layers": []}, {"dual_attention_layers": [3]}]
)
def test_flops_of_stable_diffusion_3_match_torch(height, width, caption, changes):
    tiny = MODELS["SD3.5"]
    model, shape = tiny.random(**changes).eval(), DenoiserShape.of({**tiny.config, **changes})
    latents, tokens = torch.randn(1, 4, height, width), torch.randn(1, caption, shape.caption)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(latents, tokens, torch.randn(1, shape.pooled), torch.tensor([500.0]))
    assert velocity_flops(shape, height * width // 4, caption) == pytest.approx(counter.get_total_flops(), rel=1e-12)


def test_text_encoders_of_stable_diffusion_3_have_the_stated_sizes():
    with torch.device("meta"):
        clip = [
            CLIPTextModelWithProjection(CLIPTextConfig(projection_dim=size, hidden_size=size, **config))
            for size, config in (
                (768, dict(intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)),
                (1280, dict(intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20)),
            )
        ]
        t5 = T5EncoderModel(
            T5Config(
                vocab_size=32128,
                d_model=4096,
                d_kv=64,
                d_ff=10240,
                num_layers=24,
                num_heads=64,
                feed_forward_proj="gated-gelu",
            )
        )
    shape = DenoiserShape.of(SD35_MEDIUM)
    assert sum(p.numel() for model in (*clip, t5) for p in model.parameters()) == shape.text_encoder_parameters
    # A caption always has 77 CLIP tokens and 256 T5 tokens, without padding to a multiple.
    assert [shape.caption_tokens(number) for number in (1, 70, 999)] == [77 + 256] * 3
    assert shape.image_tokens(1024, 1024) == 64 * 64 and shape.image_tokens(512, 528) == 32 * 33


@pytest.mark.parametrize("hf_config", [SD35_MEDIUM, SD35_LARGE], ids=["medium", "large"])
def test_stable_diffusion_3_has_a_plan(tmp_path, hf_config):
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    config = image_recipe(f"model.path={tmp_path}", "rollout.denoising={height: 512, width: 512, guidance: 4}")
    found = plan_recipe(config, read_cluster("8xH100"))
    assert found.num_parameters == ModelParameters(hf_config).count
    # Each denoising step has two documents, each with 1,024 image tokens and, for any caption, 333 caption tokens.
    assert workload_of(found.best.config, DenoiserShape.of(hf_config)).step_tokens == 2 * (1024 + 333)


def test_frozen_models_have_the_stated_sizes():
    """Z-Image's text encoder is Qwen3-4B, and its VAE has the architecture of Flux's."""
    with torch.device("meta"):
        encoder = Qwen3Model(
            Qwen3Config(
                vocab_size=151936,
                hidden_size=2560,
                intermediate_size=9728,
                num_hidden_layers=36,
                num_attention_heads=32,
                num_key_value_heads=8,
                head_dim=128,
            )
        )
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
            latent_channels=16,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
        assert sum(p.numel() for p in encoder.parameters()) == SHAPE.text_encoder_parameters
        assert sum(p.numel() for p in vae.parameters()) == SHAPE.decoder_parameters
        for size in (512, 1024):
            latents = torch.empty(1, 16, size // 8, size // 8)
            with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
                image = vae.decode(latents).sample
            assert image.shape == (1, 3, size, size)
            assert counter.get_total_flops() == pytest.approx(DECODER_FLOPS * size**2, rel=0.05)


def test_parameter_count_matches_z_image():
    with torch.device("meta"):
        model = ZImageTransformer2DModel.from_config(Z_IMAGE)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert ModelParameters(Z_IMAGE).count == count == Z_IMAGE_PARAMETERS


@pytest.mark.parametrize(
    "layout", [dict(dp=8), dict(tp=2, dp=4), dict(pp=2, dp=4), dict(tp=2, pp=2, cp=2), dict(pp=3, vpp=2)]
)
def test_stages_hold_the_whole_model(layout):
    """Weights are bfloat16, gradients float32. The optimizer's 12 bytes per parameter are sharded over dp · cp ranks.
    The embedder of the noise level is on every stage, and norms are on every tensor-parallel rank."""
    gpus = layout.get("pp", 1) * layout.get("tp", 1) * layout.get("cp", 1) * layout.get("dp", 1)
    keys = (*layout_keys(**layout), f"rollout.replicas={gpus}", "actor.recompute=full")
    config, model = image_recipe(*keys), ModelParameters(Z_IMAGE)
    sizes = config.actor.layout
    counts = [model.of_stage(sizes, stage).count for stage in range(sizes.pp)]
    assert Z_IMAGE_PARAMETERS <= sizes.tp * sum(counts) <= 1.03 * Z_IMAGE_PARAMETERS
    training = next(load for load in plan_of(*keys, gpus=f"{gpus}xH100").loads if load.phase.startswith(TRAINING))
    parts = training.parts
    assert parts["actor: gradients"] == 2 * parts["actor: parameters"]
    shards = sizes.dp * sizes.cp
    assert parts["actor: optimizer"] == pytest.approx(6 * parts["actor: parameters"] / shards, rel=1e-6)


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_update_time_follows_from_operations(guidance):
    """32 prompts have 24 images of 1,024 tokens each, and captions of 70 tokens, padded to 96. Nine of ten steps are
    trained. Guidance adds documents with an empty caption of 32 tokens."""
    plan = plan_of(*layout_keys(dp=8), f"rollout.denoising.guidance={guidance}", captions=70)
    captions = (96, 32) if guidance != 1 else (96,)
    forward = sum(
        # Layers of the joint stream; two refiners of images and of captions; projections from and to the tokens.
        30 * (2 * (1024 + c) * (4 * 3840**2 + 3 * 3840 * 10240) + 4 * 3840 * (1024 + c) ** 2)
        + 2 * (2 * (1024 + c) * (4 * 3840**2 + 3 * 3840 * 10240) + 4 * 3840 * (1024**2 + c**2))
        + 2 * 3840 * (64 * 1024 + 2560 * c + 64 * (1024 + c))
        for c in captions
    )
    seconds = 3 * 32 * 24 * 9 * forward / (8 * 989.5e12 * DENSE_SHARE)
    assert plan.times.training["actor"].update["matrix products"] == pytest.approx(seconds, rel=1e-4)
    rollout = 32 * 24 * 10 * forward / (8 * 989.5e12 * DENSE_SHARE)
    assert plan.times.rollout.parts["denoising"] == pytest.approx(rollout, rel=1e-4)
    assert plan.times.rollout.seconds < 1.05 * rollout


def test_stages_share_the_operations():
    whole, halves = (
        plan_of(*layout_keys(**layout), "rollout.replicas=2", gpus="2xH100").times.training["actor"]
        for layout in (dict(dp=2), dict(pp=2))
    )
    # The first of two stages has the refiners of two layers in addition to its 15 layers.
    assert halves.update["matrix products"] == pytest.approx(17 / 16 * whole.update["matrix products"], rel=0.01)


def test_microbatch_holds_whole_denoising_steps():
    """A step has 2 x 1,024 image tokens and 64 + 32 caption tokens, so three steps fit into 8,192 tokens."""
    plan = plan_of(*layout_keys(dp=8), "rollout.denoising.guidance=4")
    packed = plan.workload.packed(plan.config.actor)
    assert packed.microbatches == 16 * 24 * 9 / 8 / 3 and packed.tokens == 3 * 2144


def test_window_reduces_training_but_not_rollouts():
    all_steps, window = (plan_of(*layout_keys(dp=8), *more).times for more in ((), ("rollout.denoising.sde_steps=3",)))
    assert window.training["actor"].update["matrix products"] == pytest.approx(
        all_steps.training["actor"].update["matrix products"] / 3, rel=1e-6
    )
    assert window.rollout == all_steps.rollout


def test_passes_are_forward_passes_of_each_trained_step():
    """A KL needs the reference's velocities, and two updates per step those of the old policy."""
    both, reference = (
        plan_of(*layout_keys(dp=8), "algorithm.kl.coefficient=0.1", *more).times.training["actor"]
        for more in ((), ("batch.prompts_per_update=32",))
    )
    assert sum(reference.passes.values()) == pytest.approx(reference.update["matrix products"] / 3)
    assert sum(both.passes.values()) == pytest.approx(2 * sum(reference.passes.values()))


def test_engines_hold_the_whole_pipeline():
    loads = {load.phase: load.parts for load in plan_of(*layout_keys(tp=2, dp=4)).loads}
    sampling = loads[SAMPLING]
    assert sampling["engine: weights"] == 2 * Z_IMAGE_PARAMETERS
    assert sampling["engine: text encoder and VAE"] == 2 * (4_022_468_096 + 83_819_683)
    assert not any("KV cache" in part or "graphs" in part for parts in loads.values() for part in parts)
    receiving = loads["while the engine receives weights"]
    assert "engine: text encoder and VAE" not in receiving, "sleeping engines keep them in host memory"


def test_startup_check_matches_the_plan():
    """Before a run, the shared GPUs are checked with the same arithmetic."""
    plan = plan_of(*layout_keys(tp=2, dp=4))
    loads = [fullest_phase(plan.config, Z_IMAGE, {"actor": Z_IMAGE}, None, gpu, 8) for gpu in (0, 7)]
    sampling = next(load for load in plan.loads if load.phase == SAMPLING)
    assert [dict(load.parts) for load in loads] == [dict(sampling.parts)] * 2


def test_offloaded_encoder_frees_gpu_memory_for_host_memory():
    kept, offloaded = (
        plan_of(*layout_keys(dp=4), "cluster.placement=disaggregated", "rollout.sleep=false", *more)
        for more in (("rollout.replicas=4",), ("rollout.replicas=4", "rollout.denoising.offload=true"))
    )
    part = "engine: text encoder and VAE"
    loads = [{load.phase: load for load in plan.loads} for plan in (kept, offloaded)]
    assert part in loads[0][SAMPLING].parts and part in loads[0]["while the engine receives weights"].parts
    assert part not in loads[1][SAMPLING].parts and loads[1][SAMPLING].total < loads[0][SAMPLING].total
    assert "engines: text encoder and VAE" not in kept.host
    assert offloaded.host["engines: text encoder and VAE"] > 4 * 7.6 * GIB


def test_adapters_need_few_gradients():
    """Rank 8 on seven projections of 34 layers: 8 · (4 · 2h + 3 · (h + f)) parameters each, all in float32."""
    plan = plan_of(*layout_keys(dp=8), "actor.lora.rank=8")
    training = next(load for load in plan.loads if load.phase.startswith(TRAINING)).parts
    adapters = 34 * 8 * (4 * 2 * 3840 + 3 * (3840 + 10240))
    assert training["actor: gradients"] == 4 * adapters
    assert training["actor: optimizer"] == adapters // 8 * 8
    matrices = 34 * (4 * 3840**2 + 3 * 3840 * 10240)
    assert training["actor: parameters"] == 2 * (Z_IMAGE_PARAMETERS + matrices) + 4 * adapters


def test_search_finds_layouts_that_fit(tmp_path):
    found = planned(tmp_path, as_is=False)
    plans = found.search_result.plans
    assert plans[0].times.seconds == min(plan.times.seconds for plan in plans)
    for plan in plans:
        assert plan.problem is None and plan.config.rollout.tp == 1
        assert broken_rules(plan.config, Z_IMAGE) == []
    assert "30 attention heads are not divisible by 4" in "\n".join(found.search_result.refused)


def test_table_and_page_describe_images(tmp_path):
    found = planned(tmp_path, *layout_keys(tp=2, dp=4), "rollout.denoising.guidance=4", "actor.recompute=full")
    text, page = table(found), render(found)
    assert "768 images of 512 x 512 pixels and 10 denoising steps" in text
    assert "6,912 denoising steps with 2,144 tokens each, with and without its caption" in text
    assert "at most 16 denoised at once per engine" in text and "6.15 billion parameters" in text
    assert not any(word in text for word in ("KV cache", "sequences", "async"))
    assert "engine: text encoder and VAE" in page and page.count("<svg") == 2


def test_image_plans_refuse_options_for_text(tmp_path):
    keys = (*layout_keys(dp=8), "actor.recompute=full")
    with pytest.raises(UserError, match=r"--response-tokens 100: rollout.engine=diffusers samples images"):
        planned(tmp_path, *keys, response_tokens=100)
    with pytest.raises(UserError, match=r"--simulate: rollout.engine=diffusers does not sample ahead"):
        simulate_steps(planned(tmp_path, *keys))


def test_microbatch_smaller_than_one_step_is_refused(tmp_path):
    """With guidance, a step of 1024 x 1024 pixels has 2 · 4,096 image tokens, and up to 512 + 32 caption tokens."""
    size = ("rollout.denoising.height=1024", "rollout.denoising.width=1024", "rollout.denoising.guidance=4")
    keys = (*layout_keys(tp=2, cp=2, dp=2), "actor.recompute=full", *size)
    with pytest.raises(UserError, match=r"up to 8736 tokens on actor.layout.cp=2 ranks .* at least 4368$"):
        planned(tmp_path, *keys, "actor.tokens_per_microbatch=4096")
    planned(tmp_path, *keys, "actor.tokens_per_microbatch=4368")


@pytest.fixture
def model(tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(Z_IMAGE))
    return str(tmp_path / "config.json")


def test_reshard_plans_image_engines(model):
    """One of the four engines on the other node receives the whole model and forwards it to the others. diffusers'
    config.json has no dtype, so weights are float32."""
    found = reshard(model, "tp=2,pp=2", "diffusers:replicas=4", 8, "inter=50GB/s,intra=400GB/s")
    assert found.written_once and found.bytes_wasted == 0 and found.ranks_destination == 4
    assert found.bytes_by_link["inter"] == pytest.approx(4 * Z_IMAGE_PARAMETERS, rel=1e-3)
    assert found.bytes_by_link["intra"] == pytest.approx(3 * 4 * Z_IMAGE_PARAMETERS, rel=1e-3)


def test_recipe_refit_stays_on_the_node(model):
    config = image_recipe(f"model.path={Path(model).parent}", *layout_keys(tp=2, pp=2, dp=2))
    found = preview_refit(config, 8, "inter=50GB/s,intra=400GB/s")
    assert found.written_once and found.bytes_wasted == 0 and found.bytes_by_link["inter"] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vllm:tp=2", "vllm engines cannot hold this model. Fix: pass diffusers:replicas=1"),
        ("diffusers:tp=2", "unknown name tp. Fix: use one of replicas"),
        ("diffusers:replicas=0", "replicas=0: expected a positive integer"),
    ],
)
def test_invalid_image_engines_are_refused(model, text, message):
    with pytest.raises(UserError, match=f"--to {text}: {message}"):
        reshard(model, "tp=2", text, 8, "inter=50GB/s,intra=400GB/s")


def test_commands_accept_image_models(model):
    result = CliRunner().invoke(
        app, ["reshard", "--model", model, "--from", "tp=2,pp=2", "--to", "diffusers:replicas=2"]
    )
    assert result.exit_code == 0 and "writes every element exactly once" in result.output
