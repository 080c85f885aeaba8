"""A policy that replays a script, and a tokenizer with the chat format of Qwen and Hermes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megarl.core.completion import Completion, VersionRun
from megarl.core.prompt_images import PromptImage

HERMES_TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
{%- elif message.role != 'system' or not tools %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def hermes_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer whose turns end with <|im_end|> and whose tool-call tags are single tokens."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<tool_call>", "</tool_call>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=HERMES_TEMPLATE)


def call(name: str, **arguments: object) -> str:
    """Return a tool call in the policy's format."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True)
class Asked:
    """A request to the sampler and its completion."""

    token_ids: list[int]
    max_new_tokens: int
    seed: int
    stop: tuple[str, ...]
    completion: Completion
    images: tuple[PromptImage, ...] = ()


@dataclass
class ScriptedPolicy:
    """A sampler that returns the texts of a script in order, with random log-probs. Each turn has a new version."""

    tokenizer: PreTrainedTokenizerFast
    script: Iterable[str]
    asked: list[Asked] = field(default_factory=list)
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        self.script = iter(self.script)

    async def __call__(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int,
        seed: int,
        stop: Sequence[str] = (),
        images: Sequence[PromptImage] = (),
    ) -> Completion:
        number, text = len(self.asked), next(self.script)
        self.asked.append(None)  # reserve the index, because calls may overlap
        await asyncio.sleep(self.delay_s)
        stopped_by = next((end for end in stop if end in text), None)
        if stopped_by is not None:
            text = text[: text.index(stopped_by) + len(stopped_by)]
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = ids if stopped_by is not None else [*ids, self.tokenizer.eos_token_id]
        is_cut = len(ids) > max_new_tokens
        ids = ids[:max_new_tokens]
        logprobs = -np.random.default_rng(number).random(len(ids), np.float32)
        completion = Completion(
            ids, logprobs, (VersionRun(number, len(ids)),), "length" if is_cut else "stop", stop=stopped_by
        )
        self.asked[number] = Asked(list(token_ids), max_new_tokens, seed, tuple(stop), completion, tuple(images))
        return completion
