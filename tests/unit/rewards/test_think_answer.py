import pytest

from megarl.rewards.think_answer import think_answer_format

RIGHT = "<think>2 and 2</think>\n<answer>4</answer>"


@pytest.mark.parametrize("response", [RIGHT, f"\n {RIGHT}\n", "<think></think><answer></answer>"])
def test_both_blocks_in_order_are_accepted(response):
    assert think_answer_format("What is 2 + 2?", response, None)


@pytest.mark.parametrize(
    "response",
    [
        "",
        "4",
        "<think>2 and 2</think>",
        "<answer>4</answer>",
        "<answer>4</answer><think>2 and 2</think>",
        "<think>2 and 2<answer>4</answer></think>",
        "<think>2 and 2<answer></think>4</answer>",
        "</think>2 and 2<think><answer>4</answer>",
        "<think>2 and 2</think></answer>4<answer>",
        "<think>2 and 2</think> so <answer>4</answer>",
        f"Well: {RIGHT}",
        f"{RIGHT} That is it.",
        RIGHT + RIGHT,
        "<think><think>2 and 2</think><answer>4</answer>",
        "<THINK>2 and 2</THINK><ANSWER>4</ANSWER>",
    ],
)
def test_any_other_format_is_rejected(response):
    assert not think_answer_format("What is 2 + 2?", response, None)


@pytest.mark.parametrize("prompt", ["…<|assistant|><think>", "…<|assistant|><think>\n"])
def test_response_may_continue_a_prompt_that_opens_thinking(prompt):
    assert think_answer_format(prompt, RIGHT.removeprefix("<think>"), None)
    assert not think_answer_format(prompt, RIGHT, None)
