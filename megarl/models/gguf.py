"""Convert a GGUF file to a Hugging Face folder: `python -m megarl.models.gguf FILE.gguf FOLDER`.

Without FOLDER, print the config.json that the folder would contain. The conversion runs in a separate process so that
its memory is freed afterwards.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(source: Path, folder: Path) -> None:
    """Write the model as float32 safetensors with its tokenizer, chat template and generation config. Requires the
    packages gguf and accelerate in addition to transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    location = _location(source)
    AutoTokenizer.from_pretrained(**location).save_pretrained(folder)
    # Dequantize, because transformers cannot save GGUF blocks.
    quantization = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**location, dtype=torch.float32, quantization_config=quantization)
    model.save_pretrained(folder)


def config_json(source: Path) -> str:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(**_location(source)).to_json_string()


def _location(source: Path) -> dict[str, str]:
    return {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}


if __name__ == "__main__":
    if len(sys.argv) > 2:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        print(config_json(Path(sys.argv[1])))
