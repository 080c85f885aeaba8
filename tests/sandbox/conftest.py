"""Fixtures of tests with real bubblewrap sandboxes."""

from __future__ import annotations

import asyncio

import pytest

from megarl.sandbox.bubblewrap import Bubblewrap
from megarl.sandbox.choice import find_provider
from megarl.sandbox.provider import Provider
from tests.sandboxes import limits


@pytest.fixture(scope="session")
def provider() -> Provider:
    """Return the provider that a run on this machine would use."""
    provider = asyncio.run(find_provider(limits(provider="bubblewrap")))
    assert isinstance(provider, Bubblewrap)
    return provider
