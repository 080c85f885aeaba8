"""An environment and an agent for tests. Some of their rollouts fail."""

from openai import AsyncOpenAI

from megarl.environments import Agent, Environment, Step, Task, Turn


class Echo(Environment):
    """Replies to each turn with its number of digits and rewards their share. A row's `mode` selects a failure."""

    def __init__(self, marks: str = "!"):
        self._marks, self._mode = marks, ""

    async def reset(self, task: Task) -> list[dict]:
        self._mode = task.columns["mode"]
        return [*task.messages, {"role": "user", "content": f"go {task.seed % 10}"}]

    def step(self, turn: Turn) -> Step:
        digits = sum(character.isdigit() for character in turn.text)
        if self._mode == "raises" and turn.number == 1:
            raise KeyError("broken world")
        reward = {"digits": digits / max(1, len(turn.text)), "bonus": 0.25}
        if turn.number == 2:
            return Step(reward={"reward": reward, "feedback": f"No, {digits}."}, done=True)
        if self._mode == "restarts" and turn.number == 0:
            return Step([{"role": "user", "content": f"{digits}{self._marks}"}], reward, restart=True)
        return Step(f"{digits}{self._marks}", reward, as_is=self._mode == "as_is")


class Client(Agent):
    """Sends two requests in one conversation and one in another. A row's `mode` selects a failure."""

    async def run(self, task: Task, base_url: str, api_key: str, model: str) -> dict[str, float]:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            messages = [*task.messages]
            texts = []
            for question in ("more", "other", None):
                answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=8)
                texts.append(answer.choices[0].message.content)
                messages += [{"role": "assistant", "content": texts[-1]}, {"role": "user", "content": question}]
                if question == "other":
                    messages = [{"role": "user", "content": "a new agent"}]
                if task.columns.get("mode") == "raises":
                    raise RuntimeError("no agent")
        return {"digits": sum(character.isdigit() for text in texts for character in text) / 24}
