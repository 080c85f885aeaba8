"""Chat completions in the OpenAI API format, as a single object or as stream chunks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megarl.environments.sessions.request import ChatRequest
from megarl.environments.sessions.session import ChatCompletion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def completion_body(
    completion: ChatCompletion, request: ChatRequest, model: str, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return the `chat.completion` object."""
    calls = _tool_calls(completion)
    content = completion.message["content"]
    message = {"role": "assistant", "content": None if calls and not content else content, "refusal": None}
    choice = {
        "index": 0,
        "message": message | ({"tool_calls": calls} if calls else {}),
        "finish_reason": completion.finish_reason,
        "logprobs": _logprobs(completion, request, tokenizer),
    }
    return _head(completion, model, "chat.completion") | {"choices": [choice], "usage": _usage(completion)}


def chunks(
    completion: ChatCompletion, request: ChatRequest, model: str, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Mapping[str, Any]]:
    """Yield the stream's chunk objects: the text, each tool call, the finish reason and, if requested, the usage."""
    head = _head(completion, model, "chat.completion.chunk")

    def chunk(delta: Mapping[str, Any], reason: str | None = None, logprobs: Any = None) -> Mapping[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        return {**head, "choices": [choice]}

    text = {"role": "assistant", "content": completion.message["content"]}
    yield chunk(text, logprobs=_logprobs(completion, request, tokenizer))
    for index, call in enumerate(_tool_calls(completion)):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, completion.finish_reason)
    if request.include_usage:
        yield {**head, "choices": [], "usage": _usage(completion)}


def _head(completion: ChatCompletion, model: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{completion.turn.number}", "object": kind, "created": int(time.time()), "model": model}


def _tool_calls(completion: ChatCompletion) -> list[dict[str, Any]]:
    """Return the tool calls with their arguments as JSON strings."""
    return [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in completion.message.get("tool_calls", ())
    ]


def _usage(completion: ChatCompletion) -> dict[str, Any]:
    sampled = completion.turn.completion
    return {
        "prompt_tokens": completion.num_prompt_tokens,
        "completion_tokens": len(sampled.token_ids),
        "total_tokens": completion.num_prompt_tokens + len(sampled.token_ids),
        "prompt_tokens_details": {"cached_tokens": sampled.num_cached_tokens},
    }


def _logprobs(
    completion: ChatCompletion, request: ChatRequest, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any] | None:
    """Return the log-prob of each sampled token, including the end-of-turn token."""
    if not request.logprobs:
        return None
    sampled = completion.turn.completion
    pairs = zip(sampled.token_ids.tolist(), sampled.logprobs.tolist(), strict=True)
    entries = [(str(tokenizer.decode([number])), logprob) for number, logprob in pairs]
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in entries
        ],
        "refusal": None,
    }
