"""Parsing of clusters, and link bandwidths of process groups."""

from __future__ import annotations

import pytest

from megarl.core.errors import UserError
from megarl.planner.hardware import GPUS, LINK_SHARE, read_cluster


@pytest.mark.parametrize("text", ["64xH100-80GB", "64xh100", "64 x H100"])
def test_cluster_is_parsed_from_number_and_gpu(text):
    cluster = read_cluster(text)
    assert (cluster.num_gpus, cluster.name, cluster.num_nodes) == (64, "H100-80GB", 8)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("H100", "expected a GPU count and type. Fix: use a form such as 64xH100-80GB"),
        ("0xH100", "expected a GPU count and type"),
        ("8xH10", r"unknown GPU H10 \(did you mean H"),
        ("8xTPU", "unknown GPU TPU. Fix: use one of A100-80GB, H100-80GB"),
    ],
)
def test_malformed_cluster_is_refused(text, problem):
    with pytest.raises(UserError, match=problem):
        read_cluster(text)


@pytest.mark.parametrize("headroom", [-0.1, 1.0])
def test_headroom_out_of_range_is_refused(headroom):
    with pytest.raises(
        UserError, match=r"^--headroom .*: expected a fraction of at least 0 and below 1. Fix: use 0.08"
    ):
        read_cluster("8xH100", headroom=headroom)


def test_every_gpu_has_plausible_figures_and_a_source():
    for gpu in GPUS.values():
        assert gpu.source
        assert gpu.memory_gib * 2**30 < 1e9 * 200
        assert gpu.network_gb_s < gpu.nvlink_gb_s < gpu.memory_gb_s


def test_ring_over_nodes_uses_network_cards_of_its_ranks():
    cluster = read_cluster("32xH100")
    inside, outside = (LINK_SHARE * 1e9 * speed for speed in (450, 50))
    assert cluster.link_bytes_per_second(8) == inside
    assert cluster.link_bytes_per_second(2, stride=4) == inside
    assert cluster.link_bytes_per_second(2, stride=8) == outside
    assert cluster.link_bytes_per_second(16, stride=2) == pytest.approx(4 * outside)
