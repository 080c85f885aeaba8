"""Gated delta nets with draft tokens, compared with the recurrence over the tokens that were kept."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megarl.ops.gated_delta import normalized
from megarl.rollout.vllm import gated_delta
from tests.closeness import assert_matches
from tests.gated_delta_reference import convolution, recurrence

WIDTH, DRAFTS = 4, 3
KEY_HEADS, VALUE_HEADS, KEYS, VALUES = 2, 4, 3, 5
CHANNELS = 2 * KEY_HEADS * KEYS + VALUE_HEADS * VALUES
SLOTS = {"a": [7, 2, 5, 1], "b": [3, 8, 6, 4]}
LENGTHS = {"a": 30, "b": 16}
STEPS = [
    {"a": (None, 5, 5)},
    {"a": (1, 4, 3)},
    {"a": (3, 4, 4), "b": (None, 1, 1)},
    {"b": (1, 1, 1), "a": (4, 2, 2)},
    {"a": (2, 1, 1), "b": (1, 4, 1)},
    {"b": (1, 4, 4)},
    {"b": (4, 3, 2), "a": (1, 4, 2)},
    {"a": (2, 3, 3)},
]
"""For each request in a step: the number of tokens that its last step kept (None: it is new), the number of tokens that
the step processes, and the number of these that are kept. A new request has no draft tokens."""


@pytest.mark.parametrize("is_dim_first", [False, True])
def test_states_follow_the_kept_draft_tokens(monkeypatch: pytest.MonkeyPatch, is_dim_first: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    # Fill the slots with random values, as if earlier requests had used them.
    inputs_cache = random(9, WIDTH - 1 + DRAFTS, CHANNELS)
    layer = SimpleNamespace(
        prefix="layer",
        kv_cache=(inputs_cache.transpose(1, 2) if is_dim_first else inputs_cache, random(9, VALUE_HEADS, VALUES, KEYS)),
        conv1d=SimpleNamespace(weight=random(CHANNELS, 1, WIDTH)),
        A_log=random(VALUE_HEADS),
        dt_bias=random(VALUE_HEADS),
        **dict(key_dim=KEY_HEADS * KEYS, value_dim=VALUE_HEADS * VALUES, tp_size=1, head_k_dim=KEYS, head_v_dim=VALUES),
    )
    context = SimpleNamespace(no_compile_layers={"layer": layer}, attn_metadata=None)
    monkeypatch.setattr(gated_delta, "get_forward_context", lambda: context)
    monkeypatch.setattr(gated_delta, "is_conv_state_dim_first", lambda: is_dim_first)
    kept = {name: [random(n, CHANNELS), random(n, VALUE_HEADS), random(n, VALUE_HEADS)] for name, n in LENGTHS.items()}
    positions, outputs = dict.fromkeys(kept, 0), {name: [] for name in kept}
    for step in STEPS:
        parts = []
        for name, (_, count, good) in step.items():
            start = positions[name]
            rejected = [random(count - good, x.shape[1]) for x in kept[name]]
            parts.append([torch.cat((x[start : start + good], y)) for x, y in zip(kept[name], rejected, strict=True)])
        context.attn_metadata = {"layer": metadata(step)}
        rows = [torch.cat(columns) for columns in zip(*parts, strict=True)]
        out = torch.full((len(rows[0]), VALUE_HEADS, VALUES), torch.nan)
        gated_delta.attention_core(*rows, out, "layer")
        for (name, (_, _, good)), found in zip(step.items(), out.split([len(x) for x, *_ in parts]), strict=True):
            outputs[name].append(found[:good])
            positions[name] += good
    for name, (inputs, b, a) in kept.items():
        found, rows = torch.cat(outputs[name]), [x[: positions[name]] for x in (inputs, b, a)]
        assert len(found) == positions[name] > 8
        assert_matches({name: found}, lambda name=name, rows=rows: {name: reference(layer, *rows)}, "request")


def metadata(step: dict[str, tuple[int | None, int, int]]) -> SimpleNamespace:
    """Return what vLLM's GDNAttentionMetadataBuilder builds for a batch."""
    verifying = {name: request for name, request in step.items() if request[0] is not None}
    others = {name: request for name, request in step.items() if request[0] is None}
    is_verified = torch.tensor([name in verifying for name, (_, count, _) in step.items() for _ in range(count)])
    common = dict(num_actual_tokens=len(is_verified), num_decodes=0, num_prefills=len(others))
    common |= dict(
        non_spec_query_start_loc=starts(others),
        non_spec_state_indices_tensor=torch.tensor([SLOTS[name][0] for name in others], dtype=torch.int32),
        has_initial_state=torch.zeros(len(others), dtype=torch.bool),
    )
    if not verifying:
        return SimpleNamespace(spec_sequence_masks=None, **common)
    return SimpleNamespace(
        spec_sequence_masks=torch.tensor([name in verifying for name in step]),
        num_spec_decodes=len(verifying),
        spec_token_indx=is_verified.nonzero()[:, 0].int(),
        non_spec_token_indx=(~is_verified).nonzero()[:, 0].int(),
        spec_query_start_loc=starts(verifying),
        spec_state_indices_tensor=torch.tensor([SLOTS[name] for name in verifying], dtype=torch.int32),
        num_accepted_tokens=torch.tensor([last for last, *_ in verifying.values()], dtype=torch.int32),
        **common,
    )


def starts(requests: dict[str, tuple[int | None, int, int]]) -> torch.Tensor:
    return torch.tensor([0, *(count for _, count, _ in requests.values())]).cumsum(0).int()


def reference(layer: SimpleNamespace, inputs: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Return the result in the default dtype."""
    dtype, bounds = torch.get_default_dtype(), torch.tensor([0, len(inputs)])
    inputs, b, a = (x.to(dtype) for x in (inputs, b, a))
    mixed = convolution(inputs, layer.conv1d.weight[:, 0].to(dtype), bounds)
    query, key, value = mixed.split((KEY_HEADS * KEYS, KEY_HEADS * KEYS, VALUE_HEADS * VALUES), 1)
    copies = VALUE_HEADS // KEY_HEADS
    query, key = (normalized(x.unflatten(1, (-1, KEYS))).repeat_interleave(copies, 1) for x in (query, key))
    decay = -layer.A_log.to(dtype).exp() * F.softplus(a + layer.dt_bias.to(dtype))
    return recurrence(query, key, value.unflatten(1, (-1, VALUES)), decay, b.sigmoid(), bounds)[0]
