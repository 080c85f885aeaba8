"""Answers of the endpoint, as clients of the OpenAI API read them: whole, or as the events of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megarl.environments.sessions.request import ChatRequest
from megarl.environments.sessions.session import Answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def completion(answer: Answer, request: ChatRequest, model: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the answer to a request without a stream."""
    calls = _calls(answer)
    content = answer.message["content"]
    message = {"role": "assistant", "content": None if calls and not content else content, "refusal": None}
    choice = {
        "index": 0,
        "message": message | ({"tool_calls": calls} if calls else {}),
        "finish_reason": answer.finish_reason,
        "logprobs": _logprobs(answer, request, tokenizer),
    }
    return _head(answer, model, "chat.completion") | {"choices": [choice], "usage": _usage(answer)}


def events(
    answer: Answer, request: ChatRequest, model: str, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Mapping[str, Any]]:
    """Return the events of a stream: the text, each call, the end, and the usage if it was asked for."""
    head = _head(answer, model, "chat.completion.chunk")

    def event(delta: Mapping[str, Any], reason: str | None = None, logprobs: Any = None) -> Mapping[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        return {**head, "choices": [choice]}

    text = {"role": "assistant", "content": answer.message["content"]}
    yield event(text, logprobs=_logprobs(answer, request, tokenizer))
    for place, call in enumerate(_calls(answer)):
        yield event({"tool_calls": [{"index": place, **call}]})
    yield event({}, answer.finish_reason)
    if request.include_usage:
        yield {**head, "choices": [], "usage": _usage(answer)}


def _head(answer: Answer, model: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.turn.number}", "object": kind, "created": int(time.time()), "model": model}


def _calls(answer: Answer) -> list[dict[str, Any]]:
    """Return the calls of tools, with arguments as text."""
    return [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in answer.message.get("tool_calls", ())
    ]


def _usage(answer: Answer) -> dict[str, Any]:
    sampled = answer.turn.completion
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": len(sampled.token_ids),
        "total_tokens": answer.num_prompt_tokens + len(sampled.token_ids),
        "prompt_tokens_details": {"cached_tokens": sampled.num_cached_tokens},
    }


def _logprobs(answer: Answer, request: ChatRequest, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """Return the log-prob of each token that was sampled, the one that ended the turn included."""
    if not request.logprobs:
        return None
    sampled = answer.turn.completion
    pairs = zip(sampled.token_ids.tolist(), sampled.logprobs.tolist(), strict=True)
    entries = [(tokenizer.decode([number]), logprob) for number, logprob in pairs]
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in entries
        ],
        "refusal": None,
    }
