import re
from collections import Counter

from megarl.data.arithmetic import arithmetic_labels, arithmetic_messages, arithmetic_preferences, arithmetic_rows


def test_answers_are_sums_and_all_digit_pairs_occur():
    pairs = Counter()
    for number, row in enumerate(arithmetic_rows(seed=0, size=2000), start=1):
        left, right = re.fullmatch(r"What is (\d)\+(\d)\? Answer with just the number\.", row.prompt).groups()
        assert row.number == number
        assert row.answer == str(int(left) + int(right))
        pairs[left, right] += 1
    assert len(pairs) == 100
    assert max(pairs.values()) < 50  # 20 on average


def test_rows_depend_on_the_seed_only():
    prompts = [[row.prompt for row in arithmetic_rows(seed, 50)] for seed in (0, 0, 1)]
    assert prompts[0] == prompts[1] != prompts[2]


def test_first_rows_are_the_same_on_every_machine():
    assert [row.answer for row in arithmetic_rows(seed=0, size=8)] == ["9", "0", "11", "11", "11", "6", "5", "13"]


def test_messages_and_preferences_have_the_rows_answers():
    rows = list(arithmetic_rows(seed=3, size=50))
    turns = [[(m["role"], m["content"]) for m in row.messages] for row in arithmetic_messages(seed=3, size=50)]
    assert turns == [[("user", row.prompt), ("assistant", row.answer)] for row in rows]
    preferences = list(arithmetic_preferences(seed=3, size=50))
    assert [(row.prompt, row.chosen) for row in preferences] == [(row.prompt, row.answer) for row in rows]


def test_rejected_responses_cover_all_wrong_sums():
    rows = list(arithmetic_preferences(seed=0, size=2000))
    assert all(row.rejected != row.chosen for row in rows)
    assert {row.rejected for row in rows} == {str(total) for total in range(19)}


def test_labels_are_one_before_the_first_wrong_step():
    rows = list(arithmetic_labels(seed=0, size=400))
    num_correct = 0
    for row in rows:
        addends = [int(digit) for digit in row.prompt.split("?")[0].removeprefix("What is ").split("+")]
        total, is_correct = addends[0], True
        for step, addend, label in zip(row.steps, addends[1:], row.labels, strict=True):
            left, _, right = step.partition("=")
            assert left == f"{total}+{addend}"
            is_correct = is_correct and int(right) == total + addend
            assert label == float(is_correct)
            total = int(right)
        num_correct += is_correct
    assert 150 < num_correct < 250
    assert {row.labels.index(0.0) for row in rows if 0.0 in row.labels} == {0, 1, 2}
