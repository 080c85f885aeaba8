import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult


class LettersHarness(vf.Harness[vf.HarnessConfig]):
    """Sends the prompt's letters one by one, from this process."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> ProgramResult:
        messages = []
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for letter in data.prompt:
                messages.append({"role": "user", "content": letter})
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        return ProgramResult(0, "", "")
