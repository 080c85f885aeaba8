import re
from collections import Counter

from megarl.data.arithmetic import arithmetic_rows


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
