"""Tests that the benchmark scripts start and that their arithmetic is correct. Measurements are not tested."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.forked import run_ranks
from tests.forked_script import run_script
from tests.paths import ROOT
from tools.benchmarks import figures, rounding, shared_prefixes

FOLDER = ROOT / "tools" / "benchmarks"


def output_of(*command: str) -> str:
    return subprocess.run([sys.executable, *command], cwd=FOLDER, check=True, capture_output=True, text=True).stdout


def printed_by(code: str, folder: Path) -> str:
    """Run code next to the benchmark scripts, in a fork of this process, which has already imported torch."""
    script = folder / "script.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(FOLDER)!r})\n{code}")
    done = run_script(script, cwd=FOLDER)
    assert done.returncode == 0, done.stderr
    return done.stdout


SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if "\n    run_benchmark(" in path.read_text())


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_prints_help(script):
    done = run_script(FOLDER / script, "--help", cwd=FOLDER)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage:" in done.stdout


@pytest.mark.exhaustive
def test_head_is_measured_against_full_logits(tmp_path):
    sizes = ["--shape", "tiny", "--samples", "4", "--prompt", "20", "--response", "12"]
    output_of("training_step.py", "head", *sizes, "--out", str(tmp_path / "head.json"))
    result = json.loads((tmp_path / "head.json").read_text())
    assert (result["tokens"], result["vocabulary"], result["hidden"]) == (4 * 32, 512, 96)
    assert result["share_of_logits"]["tiled"] == result["tiled"]["extra_bytes"] / (128 * 512 * 4)
    assert [len(result[side]["seconds"]) for side in ("plain", "tiled")] == [2, 2]


@pytest.mark.exhaustive
def test_divergences_are_measured_against_the_head(tmp_path):
    sizes = ["--shape", "tiny", "--samples", "4", "--prompt", "20", "--response", "12"]
    output_of("training_step.py", "divergence", *sizes, "--out", str(tmp_path / "divergence.json"))
    result = json.loads((tmp_path / "divergence.json").read_text())
    assert result["divergences"].keys() == {"forward_kl", "reverse_kl", "jsd"}
    for sides in result["divergences"].values():
        assert sides["ratio_to_head"] == sides["tiled"]["median_seconds"] / result["tiled"]["median_seconds"]
        assert sides["share_of_logits"]["tiled"] == sides["tiled"]["extra_bytes"] / (128 * 512 * 4)


def test_shared_prefix_updates_meet_their_target():
    recorded = figures.result("shared_prefixes")["cases"]
    assert recorded.keys() == shared_prefixes.CASES.keys()
    # The first case is a prompt with 8 responses, the second one a prompt with 4 rollouts of five parts, and a branch.
    tokens = dict(zip(recorded, [512 + 8 * 128, 256 + 4 * 5 * 64 + 64], strict=True))
    for name, case in recorded.items():
        samples = shared_prefixes.CASES[name](random.Random(0))
        assert len(samples) == case["samples"]
        apart = sum(len(sample.prompt.token_ids) + len(sample.response_ids) for sample in samples)
        assert case["tokens"] == {"shared": tokens[name], "apart": apart}
        assert case["ratio_of_seconds"] <= 0.4


def test_mixed_lengths_have_the_requested_median_and_maximum(tmp_path):
    code = "from training_case import mixed_lengths; import json; print(json.dumps(mixed_lengths(1000, 5, 400)))"
    lengths = json.loads(printed_by(code, tmp_path))
    responses = sorted(response for _, response in lengths)
    assert {prompt for prompt, _ in lengths} == {5}
    assert 45 < responses[500] < 55
    assert responses[0] >= 1 and responses[-1] == 400


@pytest.mark.exhaustive
def test_driver_figures_are_rendered_from_results(tmp_path, monkeypatch):
    sizes = ["--prompts", "16", "--samples-per-prompt", "4", "--tokens", "100", "--ranks", "8"]
    output_of("driver.py", "step", *sizes, "--out", str(tmp_path / "driver.json"))
    output_of("driver.py", "start", "--case", "qwen2.5-0.5b", "--out", str(tmp_path / "start.json"))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    assert "64 samples of 100 tokens and 8 ranks" in figures.render("figures", "driver").replace("\n", " ")
    start = figures.render("figures", "start").replace("\n", " ")
    assert "start a run of Qwen2.5-0.5B on 8 ranks with 4 × tp=2 engines" in start


def test_driver_of_1024_ranks_meets_its_targets():
    step, start = figures.result("driver"), figures.result("start")
    assert (step["prompts"] * step["samples_per_prompt"], step["ranks"], start["ranks"]) == (16384, 1024, 1024)
    assert sum(step["driver"]["cpu_seconds"].values()) <= 3
    assert sum(start["driver_cpu_seconds"].values()) <= 60
    rank = step["rank"]
    assert sum(rank["cpu_seconds"].values()) <= 1
    assert rank["bytes"] <= 9 * rank["tokens"]
    assert rank["cpu_seconds"]["collate"] <= 0.15e-6 * rank["tokens"]
    most, fewest = (step["driver"]["peak_bytes_by_tokens"][tokens] for tokens in ("2000", "250"))
    assert most <= 1.1 * fewest  # memory grows with samples, not with tokens


@pytest.mark.exhaustive
def test_share_of_changed_parameters_follows_step_and_ulp(tmp_path):
    """Adam's first step equals the learning rate for every element whose gradient is not tiny."""
    rate = 1e-5
    language = rounding.Language(0)
    rounding.write_model(tmp_path, language, updates=5, hidden=64, layers=1, seed=0)
    batch = language.batch(rounding.NEW)
    options = [option for option in rounding.OPTIONS if option != "float32"]
    changed = dict(zip(options, run_ranks(1, changed_shares, options, tmp_path, batch, rate)[0], strict=True))
    tensors = load_file(tmp_path / "model.safetensors").values()
    weights = torch.cat([weight.flatten() for weight in tensors]).abs()
    infinity = torch.tensor(torch.inf, dtype=torch.bfloat16)
    cells = torch.nextafter(weights, infinity).double() - weights.double()
    step_in_cells = (rate / cells).clamp(max=1)
    for option in ("dithered", "stochastic rounding", "stochastic rounding, no main weights"):
        assert changed[option] == pytest.approx(float(step_in_cells.mean()), rel=0.1), option
    half_finer = (step_in_cells * 8 > 0.5).double().mean()  # float16 has three more mantissa bits for normal numbers
    assert changed["copies"] == pytest.approx(float((step_in_cells > 0.5).double().mean()), rel=0.1)
    assert changed["float16"] == pytest.approx(float(half_finer), rel=0.1)


def changed_shares(store, rank, options, folder, batch, rate) -> list[float]:
    return [rounding.train(option, folder, [batch], rate, seed=0)[1] for option in options]


@pytest.mark.parametrize("rate", [1e-5, 1e-6])
def test_dithered_updates_learn_the_most(rate):
    """Check the recorded result of five models and languages. Seeds differ by one or two percent."""
    runs = {run["option"]: run["learned"] for run in figures.result("lost_updates")["runs"] if run["lr"] == rate}
    learned = {option: sum(values) / len(values) for option, values in runs.items()}
    assert {len(values) for values in runs.values()} == {5}
    assert learned["dithered"] == pytest.approx(learned["float32"], rel=0.02)
    assert learned["dithered"] > 0.99 * max(learned[option] for option in learned if option != "float32")
    assert learned["copies"] < 0.8 * learned["dithered"]


def test_stochastic_rounding_is_unbiased_and_returns_neighbors():
    torch.manual_seed(0)
    values = torch.tensor([0.1, -0.1, 3.01, 1.0, 2.0**-20 * 1.003])
    rounded = rounding.stochastically_rounded(values.expand(20000, -1))
    infinity = torch.tensor(torch.inf, dtype=torch.bfloat16)
    near = values.bfloat16()
    gap = torch.nextafter(near, infinity).double() - near.double()
    assert ((rounded.double() - values.double()).abs() < gap).all()
    assert torch.equal(rounded[:, 3], torch.ones(20000, dtype=torch.bfloat16))
    error = (rounded.double().mean(0) - values.double()).abs()
    assert (error <= 5 * rounded.double().std(0) / 20000**0.5).all()
