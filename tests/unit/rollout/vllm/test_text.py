"""The text of a response equals vLLM's, which is decoded token by token."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from megarl.models.tokenizer import UNDECODED, response_text
from tests.tiny_model import merging_tokenizer

TEXT = "Grüße, 世界! 🙂🙂 a b  c\n1 + 1 = 2"


def sentences() -> PreTrainedTokenizerFast:
    """Return a tokenizer like SentencePiece's: it prepends a space and encodes unknown characters as bytes."""
    words = ["▁", "▁a", "a", "b", "▁b", "c", "▁1", "1", "▁+", "▁=", "▁2"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    model = models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def streamed(tokenizer: PreTrainedTokenizerFast, prompt_ids: list[int], response_ids: list[int]) -> str:
    request = SimpleNamespace(request_id="0", prompt_token_ids=prompt_ids, sampling_params=SamplingParams())
    stream = FastIncrementalDetokenizer(tokenizer, request)
    stream.update(response_ids, stop_terminated=False)
    return stream.get_next_output_text(finished=True, delta=False)


@pytest.mark.parametrize("make", [merging_tokenizer, lambda: merging_tokenizer("a Ġ", "Ġ b"), sentences])
def test_response_text_equals_vllms_stream(make) -> None:
    """Covers whole texts, texts that end within a character, and special tokens in between."""
    tokenizer, chance = make(), random.Random(0)
    prompt_ids, ids = tokenizer.encode(TEXT, add_special_tokens=False), tokenizer.encode(TEXT)
    assert response_text(tokenizer, prompt_ids, ids).strip() == TEXT
    whole = [i for i in range(len(ids)) if not tokenizer.decode(ids[:i]).endswith(UNDECODED)]
    for end in range(len(ids) + 1):
        for begin in (0, chance.choice([i for i in whole if i <= end])):
            response = [*ids[begin:end]]
            response.insert(chance.randrange(1 + len(response)), tokenizer.eos_token_id)
            assert response_text(tokenizer, prompt_ids, response) == streamed(tokenizer, prompt_ids, response), response
