"""A check of all models that these tests build."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from megarl.megatron.model import build
from megarl.models.shape import ModelShape
from megarl.resharding.families.megatron import VOCABULARY_MULTIPLE


@pytest.fixture(scope="package", autouse=True)
def vocabulary_on_every_rank() -> Iterator[None]:
    """Reject models that leave a tensor-parallel rank with only padding, which would hide missing all-reduces. The
    ranks are forked, so they inherit this check."""
    build_chunk = build.build_chunk

    def checked(config: Any, hf_config: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        vocab, tp = ModelShape.of(hf_config).vocab, config.tensor_model_parallel_size
        rows_per_rank = -(-vocab // (VOCABULARY_MULTIPLE * tp)) * VOCABULARY_MULTIPLE
        assert vocab > rows_per_rank * (tp - 1), (
            f"vocab_size={vocab}: with TP{tp}, the last rank has only padding. Use SHARDED_VOCAB"
        )
        return build_chunk(config, hf_config, *args, **kwargs)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(build, "build_chunk", checked)
        yield
