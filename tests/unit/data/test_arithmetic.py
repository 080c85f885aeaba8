import re
from collections import Counter

from megarl.data.arithmetic import arithmetic_labels, arithmetic_messages, arithmetic_preferences, arithmetic_rows


def test_every_answer_is_the_sum_and_every_pair_of_digits_occurs():
    pairs = Counter()
    for number, row in enumerate(arithmetic_rows(seed=0, size=2000), start=1):
        left, right = re.fullmatch(r"What is (\d)\+(\d)\? Answer with just the number\.", row.prompt).groups()
        assert row.number == number
        assert row.answer == str(int(left) + int(right))
        pairs[left, right] += 1
    assert len(pairs) == 100
    assert max(pairs.values()) < 50  # 20 expected


def test_the_seed_decides():
    prompts = [[row.prompt for row in arithmetic_rows(seed, 50)] for seed in (0, 0, 1)]
    assert prompts[0] == prompts[1] != prompts[2]


def test_the_first_rows_are_the_same_on_every_machine():
    assert [row.answer for row in arithmetic_rows(seed=0, size=8)] == ["9", "0", "11", "11", "11", "6", "5", "13"]


def test_given_answers_are_those_of_the_prompts():
    rows = list(arithmetic_rows(seed=3, size=50))
    said = [[(m["role"], m["content"]) for m in row.messages] for row in arithmetic_messages(seed=3, size=50)]
    assert said == [[("user", row.prompt), ("assistant", row.answer)] for row in rows]
    preferences = list(arithmetic_preferences(seed=3, size=50))
    assert [(row.prompt, row.chosen) for row in preferences] == [(row.prompt, row.answer) for row in rows]


def test_every_other_sum_is_rejected_somewhere():
    rows = list(arithmetic_preferences(seed=0, size=2000))
    assert all(row.rejected != row.chosen for row in rows)
    assert {row.rejected for row in rows} == {str(total) for total in range(19)}


def test_steps_are_right_up_to_the_first_that_is_wrong():
    rows = list(arithmetic_labels(seed=0, size=400))
    wholly_right = 0
    for row in rows:
        addends = [int(digit) for digit in row.prompt.split("?")[0].removeprefix("What is ").split("+")]
        so_far, right = addends[0], True
        for step, addend, label in zip(row.steps, addends[1:], row.labels, strict=True):
            asked, _, said = step.partition("=")
            assert asked == f"{so_far}+{addend}"
            right = right and int(said) == so_far + addend
            assert label == float(right)
            so_far = int(said)
        wholly_right += right
    assert 150 < wholly_right < 250
    assert {row.labels.index(0.0) for row in rows if 0.0 in row.labels} == {0, 1, 2}
