"""An agent that asks the policy by the openai client: twice in one conversation, and once in another."""

import openai

from megarl.environments import Agent


class Asker(Agent):
    async def run(self, task, base_url, api_key, model):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)

        async def ask(messages: list) -> str:
            text = ""
            stream = await client.chat.completions.create(
                model=model, messages=messages, max_tokens=8, temperature=0.1, stream=True
            )
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
            return text

        talk = list(task.messages)
        talk += [{"role": "assistant", "content": await ask(talk)}, {"role": "user", "content": "more"}]
        other = await ask([{"role": "user", "content": "other"}])
        text = await ask(talk)
        return {"digits": sum(map(str.isdigit, text + other)) / 8, "bonus": 0.5}
