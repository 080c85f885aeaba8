"""Converts a GGUF file to a Hugging Face folder: `python -m megarl.data.gguf FILE.gguf FOLDER`.

A process of its own, so that the memory of the conversion is given back when it ends.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(source: Path, folder: Path) -> None:
    """Writes the model as float32 safetensors, with its tokenizer, chat template and generation config.

    Needs the packages gguf and accelerate beside transformers.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    location = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    AutoTokenizer.from_pretrained(**location).save_pretrained(folder)
    # Without `dequantize` the weights stay in GGUF blocks, which cannot be saved.
    quantization = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**location, dtype=torch.float32, quantization_config=quantization)
    model.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
