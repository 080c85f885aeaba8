"""Fixtures of tests in real sandboxes of bubblewrap."""

from __future__ import annotations

import asyncio

import pytest

from megarl.sandbox.bubblewrap import Bubblewrap
from megarl.sandbox.choice import find_provider
from megarl.sandbox.provider import Provider
from tests.sandboxes import limits


@pytest.fixture(scope="session")
def provider() -> Provider:
    """What a run would have here. Programs have no root's rights to give up."""
    found = asyncio.run(find_provider(limits(provider="bubblewrap")))
    assert isinstance(found, Bubblewrap)
    return found
