import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult


class LettersHarness(vf.Harness[vf.HarnessConfig]):
    """Asks for one letter of the prompt after the other, in this process."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> ProgramResult:
        talk = []
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for letter in data.prompt:
                talk.append({"role": "user", "content": letter})
                answer = await client.chat.completions.create(model=ctx.model, messages=talk)
                talk.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        return ProgramResult(0, "", "")
