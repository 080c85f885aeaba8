"""Tests of the learning tasks: known optima and scores, and puzzles with a unique solution."""

from itertools import product

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from megarl.rewards.knights_knaves import knights_knaves
from tests.closeness import TOLERANCE, relative_error
from tests.e2e.knights import FITS, NOT, PEOPLE, answer, puzzles, thought
from tests.e2e.learning_tasks import (
    EVEN,
    of_forward_kl,
    of_reverse_kl,
    trained_teacher,
    write_hinted,
    write_teacher,
    write_token_scorer,
)
from tests.tiny_model import tiny_tokenizer


@pytest.mark.parametrize(
    ("optimum", "divergence"),
    [
        (of_reverse_kl, lambda policy, reference: (policy.exp() * (policy - reference)).sum(-1)),
        (of_forward_kl, lambda policy, reference: (reference.exp() * (reference - policy)).sum(-1)),
    ],
    ids=["reverse", "forward"],
)
@pytest.mark.parametrize("beta", [0.3, 2.0])
def test_closed_form_optimum_equals_gradient_ascent(optimum, divergence, beta):
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(3, 6, dtype=torch.float64, generator=generator).log_softmax(-1)
    rewards = torch.randn(6, dtype=torch.float64, generator=generator)
    logits = reference.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([logits], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        policy = logits.log_softmax(-1)
        negative = -((policy.exp() * rewards).sum(-1) - beta * divergence(policy, reference)).sum()
        negative.backward()
        return negative

    optimizer.step(loss)
    torch.testing.assert_close(optimum(reference, rewards, beta).exp(), logits.detach().softmax(-1), rtol=0, atol=1e-5)


def test_token_scores_are_independent_of_context(tmp_path):
    write_token_scorer(tmp_path, [7, 11])
    model = AutoModelForTokenClassification.from_pretrained(tmp_path)
    ids = torch.tensor([[3, 7, 50, 11, 11, 127, 7]])
    with torch.no_grad():
        scores = model(ids).logits[0, :, 0]
    assert relative_error(scores, torch.tensor([0.0, 1, 0, 1, 1, 0, 1])) <= TOLERANCE


def test_teacher_writes_its_tokens_after_any_text(tmp_path):
    write_teacher(tmp_path, [7, 11])
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        probabilities = model(torch.tensor([[3, 7, 50, 11, 127]])).logits[0].softmax(-1)
    assert (probabilities[:, [7, 11]].sum(-1) > 0.97).all()
    torch.testing.assert_close(probabilities[:, 7], probabilities[:, 11])


@pytest.mark.slow
def test_trained_teacher_answers_with_its_tokens():
    good = [tiny_tokenizer().get_vocab()[digit] for digit in EVEN]
    asked = tiny_tokenizer().encode("<|user|>What is 2+9? Answer with just the number.<eos><|assistant|>")
    said = torch.tensor(good)[torch.randint(5, (16, 7), generator=torch.Generator().manual_seed(1))]
    ids = torch.cat((torch.tensor([asked]).expand(16, -1), said), 1)
    teacher = trained_teacher(tuple(good))
    with torch.no_grad():
        probabilities = teacher(ids).logits[:, -8:].softmax(-1)[..., good]
    assert (probabilities.sum(-1) > 0.98).all()
    assert (probabilities > 0.1).all()


def test_hinted_model_writes_its_tokens_after_a_hint(tmp_path):
    write_hinted(tmp_path, [7, 11], hint=5)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        without, with_hint = (
            model(torch.tensor([ids])).logits[0, -1].softmax(-1) for ids in ([3, 50, 4], [3, 5, 5, 4])
        )
    torch.testing.assert_close(without, torch.full_like(without, 1 / len(without)))
    assert with_hint[[7, 11]].sum() > 0.95


def test_only_the_solution_of_a_puzzle_fits():
    """The solution is reasoning-gym's, and the reward function is the one used in the runs."""
    for puzzle in puzzles(40, seed=3):
        thoughts = {roles: thought(puzzle.statements, roles) for roles in product((True, False), repeat=len(PEOPLE))}
        assert all(text.endswith((FITS, NOT)) for text in thoughts.values())
        [fitting] = [roles for roles, text in thoughts.items() if text.endswith(FITS)]
        for roles, text in thoughts.items():
            response = f"<think>{text}</think><answer>{answer(roles)}</answer>"
            assert knights_knaves("", response, puzzle.answer) == (2.0 if roles == fitting else -1.5)
