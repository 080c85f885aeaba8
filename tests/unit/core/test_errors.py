"""The messages of errors, and the chain of errors that caused an error."""

from __future__ import annotations

import pickle

import pytest

from megarl.core.errors import DamagedCheckpoint, RunFailure, UserError, causes


def raised(error: Exception, cause: Exception | None, is_suppressed: bool = False) -> Exception:
    """Return an error that was raised while `cause` was handled."""
    error.__context__, error.__suppress_context__ = cause, is_suppressed
    return error


def test_chain_matches_the_traceback() -> None:
    first, second, third = OSError("first"), ValueError("second"), RuntimeError("third")
    assert list(causes(raised(third, raised(second, first)))) == [third, second, first]
    assert list(causes(raised(third, second, is_suppressed=True))) == [third]
    third.__cause__ = first
    assert list(causes(third)) == [third, first]


def test_cycle_ends() -> None:
    first, second = OSError("first"), ValueError("second")
    assert list(causes(raised(first, raised(second, first)))) == [first, second]


@pytest.mark.parametrize("kind", [UserError, RunFailure, DamagedCheckpoint])
def test_message_embeds_a_sentence_with_one_full_stop(kind: type[Exception]) -> None:
    error = kind("a=1: it says: No.. Fix: remove ../b ... See .. C, or wait... Then go on..")
    assert str(error) == "a=1: it says: No. Fix: remove ../b ... See .. C, or wait... Then go on.."
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
