import json
import os
import subprocess
import sys
import textwrap
from importlib.metadata import version

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from megarl.config.model_schema import Lora
from megarl.core.errors import UserError
from megarl.models import folder as model_folder
from megarl.models.folder import ModelNotLocal, default_cache, read_config, read_local_config, real_path, resolve
from megarl.models.peft import check_adapter_config
from megarl.models.tokenizer import _is_generic, load_tokenizer


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Install a distribution that ships the named files, from a folder on sys.path."""

    def install(name: str, *files: str, content: bytes = b"GGUF") -> None:
        site = tmp_path / "site"
        record = [*files, f"{name}-1.2.dist-info/METADATA", f"{name}-1.2.dist-info/RECORD"]
        for file in record:
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            (site / file).write_bytes(content)
        (site / record[-2]).write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (site / record[-1]).write_text("".join(f"{file},,\n" for file in record))
        monkeypatch.syspath_prepend(site)

    return install


def test_folder_of_a_run_or_checkpoint_has_a_specific_fix(tmp_path):
    run, checkpoint = tmp_path / "run", tmp_path / "step_000001"
    (run / "model").mkdir(parents=True)
    (run / "model" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=rf"has no config\.json\. Fix: use {run}/model$"):
        resolve(str(run))
    (checkpoint / "actor").mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match=rf"Fix: convert .* convert megatron-to-hf --checkpoint {checkpoint} --out"):
        resolve(str(checkpoint))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"Fix: to train, use the base model with this folder as actor\.lora\.path"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("is_pipeline", "weights"),
    [
        (True, ["transformer/a.safetensors", "vae/b.safetensors"]),
        (False, ["sd3.5.safetensors", "text_encoders/c.safetensors", "transformer/a.safetensors", "vae/b.safetensors"]),
    ],
)
def test_download_of_a_pipeline_omits_other_copies(tmp_path, monkeypatch, is_pipeline, weights):
    """Stable Diffusion 3.5's repository also contains its weights as single files."""
    files = {
        "model_index.json": '{"_class_name": "P", "transformer": ["d", "T"], "vae": ["d", "V"]}',
        **dict.fromkeys(("config.json", "transformer/config.json"), "{}"),
        **dict.fromkeys(("sd3.5.safetensors", "text_encoders/c.safetensors", "a.bin"), ""),
        **dict.fromkeys(("transformer/a.safetensors", "vae/b.safetensors"), ""),
    }
    if not is_pipeline:
        del files["model_index.json"]

    def download(hub_id, *, revision, allow_patterns):
        for name in filter_repo_objects(files, allow_patterns=allow_patterns):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(files[name])
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve("someone/model")
    found = (path for path in tmp_path.rglob("*") if path.suffix in (".safetensors", ".bin"))
    assert sorted(str(path.relative_to(tmp_path)) for path in found) == weights


def test_pipeline_resolves_to_its_transformer(tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    (tmp_path / "transformer").mkdir()
    with pytest.raises(UserError, match=rf"^model\.path={tmp_path}: has no config\.json\. Fix: use the folder that"):
        resolve(str(tmp_path))
    (tmp_path / "transformer" / "config.json").write_text('{"dim": 2}')
    assert resolve(str(tmp_path)) == resolve(str(tmp_path / "transformer")) == tmp_path / "transformer"
    assert read_local_config(str(tmp_path)) == {"dim": 2}
    (tmp_path / "model_index.json").unlink()
    (tmp_path / "config.json").write_text('{"dim": 3}')
    assert resolve(str(tmp_path)) == tmp_path and read_local_config(str(tmp_path)) == {"dim": 3}


def test_damaged_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type":')
    with pytest.raises(ValueError, match=r"config.json: invalid JSON \(.*\)\. Fix: copy the model's file again"):
        read_config(tmp_path)


def test_folder_resolves_to_itself(tmp_path, monkeypatch):
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert resolve(str(folder)) == folder
    assert read_config(folder) == {"model_type": "llama"}
    monkeypatch.chdir(tmp_path)
    assert resolve("models/tiny").resolve() == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/models/tiny") == folder


def test_symlink_is_resolved_once(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": name}))
    link = tmp_path / "latest"
    link.symlink_to("first")
    assert real_path(str(link)) == str(tmp_path / "first")
    folder = resolve(str(link))
    link.unlink()
    link.symlink_to("second")
    assert read_config(folder) == {"model_type": "first"}
    for other in ("some/model", "package:name", "./absent"):
        assert real_path(other) == other


@pytest.mark.parametrize("look", [resolve, read_local_config])
def test_path_that_is_not_a_hub_id_has_no_revision(tmp_path, look):
    (tmp_path / "config.json").write_text("{}")
    for path in (str(tmp_path), "package:name"):
        with pytest.raises(
            ValueError, match=rf"^model\.revision=v1: model\.path={path} is not a Hub id .*revision=null$"
        ):
            look(path, revision="v1")


@pytest.mark.parametrize("path", ["./absent", "../absent", "/absent/model", "~/absent"])
def test_path_that_does_not_exist_is_refused(path):
    with pytest.raises(ValueError, match=rf"^model\.path={path}: does not exist\. Fix: use a Hugging Face folder"):
        resolve(path)


def test_folder_without_a_config_is_refused(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^model\.path=models: has no config\.json"):
        resolve("models")


def test_hub_ids_are_read_from_the_cache_when_offline(tmp_path):
    repository = tmp_path / "hub" / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    for revision, commit in (("main", "abc"), ("v1", "def")):
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}" if revision == "main" else '{"revision": 1}')
        (repository / "refs" / revision).write_text(commit)
    image_model = repository / "snapshots" / "0a1"  # a diffusers folder
    (image_model / "transformer").mkdir(parents=True)
    (image_model / "model_index.json").write_text("{}")
    (image_model / "transformer" / "config.json").write_text('{"dim": 2}')
    (repository / "refs" / "images").write_text("0a1")
    code = textwrap.dedent("""
        import sys
        from megarl.models.folder import resolve
        from megarl.models.folder import ModelNotLocal, read_local_config
        print(resolve("some/model"), read_local_config("some/model"))
        print(resolve("some/model", revision="v1"), read_local_config("some/model", revision="v1"))
        print(resolve("some/model", revision="images"), read_local_config("some/model", revision="images"))
        try:
            read_local_config("some/absent")
        except ModelNotLocal as why:
            print(why)
        for hub_id in ("some/absent", "not a hub id"):
            try:
                resolve(hub_id)
            except ValueError as error:
                print(error)
        assert "transformers" not in sys.modules and "torch" not in sys.modules
    """)
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    main, revised, images, unavailable, absent, malformed = done.stdout.splitlines()
    snapshots = repository / "snapshots"
    assert main == f"{snapshots / 'abc'} {{}}"
    assert revised == f"{snapshots / 'def'} {{'revision': 1}}"
    assert images == f"{image_model / 'transformer'} {{'dim': 2}}"
    assert unavailable == "it is neither a folder on this machine nor a downloaded Hub id"
    assert absent.startswith(
        "model.path=some/absent: neither a folder on this machine nor a Hub id that could be downloaded"
    )
    assert "HF_HUB_OFFLINE" in absent
    assert malformed.startswith("model.path=not a hub id: neither a folder on this machine")


def test_package_without_exactly_one_model_is_refused(distribution, tmp_path):
    distribution("none", "none/__init__.py")
    distribution("two", "two/a.gguf", "two/b.gguf")
    with pytest.raises(
        ValueError, match=r"the Python distribution 'absent' is not installed\. Fix: run pip install .* absent$"
    ):
        resolve("package:absent", tmp_path)
    with pytest.raises(ValueError, match=r"package:none: .* must contain exactly one \.gguf file, but contains none"):
        resolve("package:none", tmp_path)
    with pytest.raises(ValueError, match=r"package:two: .*, but contains two/a\.gguf, two/b\.gguf"):
        resolve("package:two", tmp_path)


def test_package_is_converted_once_per_version(distribution, tmp_path, monkeypatch):
    distribution("one", "one/a.gguf")
    converted = []

    def convert(key, source, folder):
        converted.append(source)
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(model_folder, "_run_conversion", convert)
    cache = tmp_path / "cache"
    folder = resolve("package:one", cache)
    assert resolve("package:one", cache) == folder == cache / f"one-1.2-transformers-{version('transformers')}"
    assert converted == [tmp_path / "site" / "one" / "a.gguf"]
    assert [path.name for path in cache.iterdir()] == [folder.name]


@pytest.mark.exhaustive
def test_config_of_a_damaged_package_is_refused(distribution, tmp_path):
    distribution("one", "one/a.gguf", content=b"no GGUF")
    with pytest.raises(ValueError, match=r"^model\.path: could not read .*one/a\.gguf as GGUF \(.+\)"):
        read_local_config("package:one", tmp_path / "cache")


def test_config_of_a_package_needs_no_conversion(distribution, tmp_path, monkeypatch):
    distribution("one", "one/a.gguf", content=b"no GGUF")
    cache = tmp_path / "cache"
    folder = cache / f"one-1.2-transformers-{version('transformers')}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert read_local_config("package:one", cache) == {"model_type": "llama"}
    monkeypatch.setattr(model_folder.importlib.util, "find_spec", lambda name: None if name == "torch" else name)
    with pytest.raises(ModelNotLocal, match="requires torch"):
        read_local_config("package:one", cache)


def test_first_of_two_concurrent_conversions_wins(distribution, tmp_path, monkeypatch):
    distribution("one", "one/a.gguf")
    cache = tmp_path / "cache"
    target = cache / f"one-1.2-transformers-{version('transformers')}"

    def convert(key, source, folder):
        for path, owner in ((folder, "late"), (target, "early")):
            path.mkdir()
            (path / "config.json").write_text(json.dumps({"_name": owner}))

    monkeypatch.setattr(model_folder, "_run_conversion", convert)
    assert read_config(resolve("package:one", cache)) == {"_name": "early"}
    assert list(cache.iterdir()) == [target]


def test_failed_conversion_leaves_no_files(distribution, tmp_path):
    distribution("one", "one/a.gguf", content=b"no GGUF")
    with pytest.raises(ValueError, match=r"^model\.path: could not read .*one/a\.gguf as GGUF \(.+\)"):
        resolve("package:one", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_missing_conversion_package_is_named(distribution, tmp_path, monkeypatch):
    distribution("one", "one/a.gguf")
    monkeypatch.setattr(model_folder.importlib.util, "find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(
        ValueError, match=r"package:one: conversion from GGUF requires gguf\. Fix: run pip install '\.\[gguf\]'"
    ):
        resolve("package:one", tmp_path / "cache")


def test_default_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("MEGARL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert str(default_cache()) == "/home/me/.cache/megarl"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert str(default_cache()) == "/xdg/megarl"
    monkeypatch.setenv("MEGARL_CACHE", "~/mine")
    assert str(default_cache()) == "/home/me/mine"


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 500 + "]" * 500, '{"a": ' + "9" * 5000 + "}", "[1]", "\xff"])
def test_odd_json_in_model_folders_is_named(tmp_path, text):
    names = ("config.json", "tokenizer_config.json", "adapter_config.json")
    for name in (*names, "tokenizer.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    readers = (
        read_config,
        load_tokenizer,
        lambda folder: check_adapter_config(folder, Lora.model_construct(rank=4, alpha=8.0)),
    )
    for name, read in zip(names, readers, strict=True):
        with pytest.raises(UserError, match=rf"{name}: invalid JSON \(.*\)\. Fix: copy"):
            read(tmp_path)


def test_a_pipe_in_a_model_folder_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "tokenizer_config.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert not _is_generic(tmp_path)
