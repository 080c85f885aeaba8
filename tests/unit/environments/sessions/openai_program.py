"""A tool-calling agent that uses only the openai client, without any megarl code.

With the argument `stream` it requests streams. The client reads OPENAI_BASE_URL and OPENAI_API_KEY.
"""

import json
import sys

import openai

TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiplies two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}


def answer_of(client: openai.OpenAI, messages: list, stream: bool) -> dict:
    asked = {"model": "gpt-4o-mini", "messages": messages, "tools": [TOOL], "temperature": 0.2}
    if not stream:
        return client.chat.completions.create(**asked).choices[0].message.model_dump(exclude_none=True)
    content, calls = "", {}
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for part in choice.delta.tool_calls or []:
                call = calls.setdefault(part.index, {"id": part.id, "type": "function", "function": {"arguments": ""}})
                call["function"]["name"] = part.function.name or call["function"]["name"]
                call["function"]["arguments"] += part.function.arguments
        if chunk.usage is not None:
            print("tokens", chunk.usage.total_tokens)
    message = {"role": "assistant", "content": content}
    return message | ({"tool_calls": list(calls.values())} if calls else {})


def main(stream: bool) -> None:
    client = openai.OpenAI()
    print("model", client.models.list().data[0].id)
    messages = [
        {"role": "system", "content": "You multiply."},
        {"role": "user", "content": "What is 6 times 7 times 2?"},
    ]
    while True:
        message = answer_of(client, messages, stream)
        messages.append(message)
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            given = json.loads(call["function"]["arguments"])
            content = str(given["a"] * given["b"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    print("answer", messages[-1]["content"])


if __name__ == "__main__":
    main(stream=sys.argv[1] == "stream")
