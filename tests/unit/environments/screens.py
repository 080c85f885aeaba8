"""Environments and agents that send images."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from megarl.environments import Agent, Environment, Opening, Step, Task, Turn, tool

LITERAL = "<|image_pad|>"
MANY = 65


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def encoded(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def part(image: object) -> dict:
    return {"type": "image", "image": image}


def text(content: str) -> dict:
    return {"type": "text", "text": content}


def user(*parts: dict) -> dict:
    return {"role": "user", "content": list(parts)}


FIRST, SECOND = (encoded(picture(*size, seed)) for seed, size in enumerate(((40, 70), (64, 64))))

UNUSABLE = {
    "http": lambda: part("http://localhost/a.png"),
    "path": lambda: part("/etc/hostname"),
    "file": lambda: {"type": "image_url", "image_url": {"url": "file:///etc/hostname"}},
    "empty": lambda: {"type": "image"},
    "damaged": lambda: part(FIRST[:200]),
    "text": lambda: part(b"not an image"),
    "bomb": lambda: part(encoded(Image.new("1", (12_000, 12_000)))),
    "huge": lambda: part(Image.new("1", (12_000, 12_000))),
    "thin": lambda: part(Image.new("L", (2000, 4))),
    "base64": lambda: part("data:image/png;base64,!!!"),
    "untyped": lambda: {"image": FIRST},
    "input": lambda: {"type": "input_image", "image_url": "data:,"},
}
"""Fault -> function that returns a part with an unusable image."""


class Screens(Environment):
    """Sends images in the opening and after each turn. The row's column `kind` selects the opening and a fault."""

    def reset(self, task: Task) -> list[dict] | Opening | None:
        self.kind = task.columns["kind"]
        if self.kind == "extended":
            return [*task.messages, user(text(f"and {LITERAL} "), part(FIRST), text("."))]
        if self.kind == "ids":
            return Opening([user(part(FIRST))], token_ids=[1, 2])
        if self.kind == "placeholder":
            return Opening(token_ids=[1, task.columns["token"], 2])
        return None

    def step(self, turn: Turn) -> Step:
        if turn.number == 2:
            return Step(reward=1.0, done=True)
        if self.kind in UNUSABLE:
            return Step([user(text("see "), UNUSABLE[self.kind]())])
        if self.kind == "pieces":
            return Step([user(text("one "), text("two"))])
        if self.kind == "object":
            return Step([{"role": "user", "content": {"image": "x"}}])
        if self.kind == "copies":
            return Step([user(*[part(SECOND)] * (MANY - 1))])
        if self.kind == "many":
            return Step([user(*[part(FIRST)] * MANY)])
        if self.kind == "as is":
            return Step([user(part(FIRST))], as_is=True)
        if self.kind == "restart" and turn.number == 0:
            return Step([user(text("again "), part(SECOND))], restart=True)
        if turn.number == 0:
            return Step([user(part(SECOND), text("or"), part(FIRST), text("?"))])
        return Step(f"{LITERAL} is text")


class Camera(Environment):
    @tool
    def look(self) -> Image.Image:
        """Return a picture."""
        return picture(64, 64, 1)

    @tool
    def compare(self) -> list[dict]:
        """Return two pictures."""
        return [text("left "), part(FIRST), text(" right "), part(SECOND)]

    @tool
    def caption(self) -> list:
        """Return a picture and a string, which is not a message part."""
        return [picture(64, 64, 1), "caption"]

    @tool
    def rows(self) -> list[dict]:
        """Return a list that looks like an image part but contains no image."""
        return [{"type": "image", "name": "a.png"}]


class Viewer(Agent):
    """Sends the task's messages, and then a picture."""

    async def run(self, task: Task, base_url: str, api_key: str, model: str) -> float:
        from openai import AsyncOpenAI  # importing it takes longer than starting the process

        client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        talk = list(task.messages)
        first = await client.chat.completions.create(model=model, messages=talk)
        url = task.messages[0]["content"][1]["image_url"]["url"]
        talk += [first.choices[0].message, user({"type": "image_url", "image_url": {"url": url}}, text("the same?"))]
        await client.chat.completions.create(model=model, messages=talk)
        return 1.0
