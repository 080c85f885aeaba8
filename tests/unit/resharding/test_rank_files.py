"""Files with weights of ranks on other nodes, read by the exporting rank."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from megarl.core.errors import UserError
from megarl.resharding.transports.rank_files import RankFiles, write_parameters


@pytest.fixture
def ranks() -> dict[str, dict[str, torch.Tensor]]:
    """The parameters of two ranks with equal names: views of a buffer, one of them transposed."""
    generator = torch.Generator().manual_seed(0)

    def parameters(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        buffer = torch.randn(64, generator=generator).to(dtype)
        views = {"row": buffer[3:10], "matrix": buffer[16:46].view(5, 6).t(), "other": buffer[50:]}
        return {name: torch.nn.Parameter(view) for name, view in views.items()}

    return {"megatron:0": parameters(torch.bfloat16), "megatron:1": parameters(torch.float32)}


def test_read_parameters_equal_the_written_ones(ranks: dict, tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ranks}
    for name, parameters in ranks.items():
        write_parameters(parameters, ["matrix", "row"], folders[name])
    transport = pickle.loads(pickle.dumps(RankFiles(folders)))  # as when it is sent to the exporting rank
    for name, parameters in ranks.items():
        assert transport.dtype(name, "row") == parameters["row"].dtype
        assert torch.equal(transport.read(name, "row", ((2, 5),)), parameters["row"][2:5])
        assert torch.equal(transport.read(name, "matrix", ((1, 6), (0, 4))), parameters["matrix"][1:6, :4])


def test_only_requested_parameters_are_written(ranks: dict, tmp_path: Path) -> None:
    """An export reads a replicated parameter from one of its ranks."""
    parameters = ranks["megatron:0"]
    write_parameters(parameters, ["row"], tmp_path / "part")
    [file] = (tmp_path / "part").iterdir()
    assert file.stat().st_size < 500 + parameters["row"].nbytes
    with pytest.raises(UserError, match="no tensor matrix"):
        RankFiles({"megatron:0": tmp_path / "part"}).read("megatron:0", "matrix", ((0, 1), (0, 1)))


def test_rank_without_requested_parameters_writes_empty_file(ranks: dict, tmp_path: Path) -> None:
    write_parameters(ranks["megatron:1"], [], tmp_path / "part")
    assert [file.name for file in (tmp_path / "part").iterdir()] == ["model.safetensors"]
