"""Selection of the sandbox provider, depending on the commands that a machine has."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.sandbox import bubblewrap
from megarl.sandbox.apptainer import Apptainer
from megarl.sandbox.choice import Unsafe, find_provider
from megarl.sandbox.provider import AGENT, Provider
from megarl.sandbox.sandbox import SandboxError
from tests.sandboxes import limits, printed


@pytest.fixture(autouse=True)
def path(tmp_path, monkeypatch) -> Path:
    """Set PATH to an empty folder, to which tests may add commands."""
    bubblewrap._bubblewrap.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    yield tmp_path
    bubblewrap._bubblewrap.cache_clear()


def put(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def choose(**changed) -> Provider:
    return asyncio.run(find_provider(limits(**changed)))


def test_refusal_without_isolation_names_the_remedies():
    with pytest.raises(UserError) as refusal:
        choose()
    text = str(refusal.value)
    assert text.startswith(
        "sandbox.provider=auto: programs cannot be isolated on this machine (bubblewrap: bwrap is not on the PATH). "
    )
    assert "apt-get install bubblewrap" in text and "sandbox.unsafe=allow" in text and "\n" not in text


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo bubblewrap 0.4.1", "is bubblewrap 0.4.1, but version 0.8 or later is required"),
        (
            '[ "$1" = --version ] && echo bubblewrap 0.11.0 && exit; echo "bwrap: No permissions" >&2; exit 1',
            "the sandbox exited with status 1: bwrap: No permissions",
        ),
    ],
)
def test_refusal_reports_why_bubblewrap_does_not_work(path, script, reason):
    put(path, "bwrap", script)
    (path / "setpriv").symlink_to("/usr/bin/setpriv")
    with pytest.raises(UserError) as refusal:
        choose(provider="bubblewrap")
    assert reason in str(refusal.value)


def test_programs_are_not_isolated_only_if_allowed(capfd):
    provider = choose(unsafe="allow")
    assert isinstance(provider, Unsafe)
    assert "With sandbox.unsafe=allow, they run as ordinary processes of this user" in capfd.readouterr().err
    assert printed(provider, "print('ran')") == "ran\n"


def test_apptainer_command_isolates_everything(path):
    """Only the command is checked, since Apptainer is not available for tests."""
    put(path, "apptainer", "exit 1")
    image = path / "python.sif"
    image.touch()
    command = Apptainer(limits(image=str(image))).command()
    program, action, *rest = command.arguments
    assert (program, action) == (str(path / "apptainer"), "exec")
    options, agent = rest[: rest.index(str(image))], rest[rest.index(str(image)) + 1 :]
    assert {"--containall", "--cleanenv", "--no-init", "--no-privs", "--no-eval"} <= set(options)
    for option, value in (("--network", "none"), ("--no-mount", "home,hostfs,bind-paths,cwd"), ("--pwd", "/tmp")):
        assert options[options.index(option) + 1] == value
    assert "--net" in options and not {"--bind", "--nv", "--writable", "--fakeroot"} & set(options)
    assert agent[:5] == ["python3", "-I", "-S", "-c", AGENT]
    assert set(command.environment) <= {"PATH", "HOME"} <= set(os.environ)


def test_missing_image_is_named(path):
    put(path, "apptainer", "exit 1")
    with pytest.raises(SandboxError, match=r"^sandbox.image=no.sif: /.*/no.sif does not exist$"):
        Apptainer(limits(image="no.sif")).command()
    assert "docker://python:3.11-slim" in Apptainer(limits(image="docker://python:3.11-slim")).command().arguments
    with pytest.raises(UserError, match=r"apptainer: the sandbox exited with status 1"):
        choose(provider="apptainer", image="docker://python:3.11-slim")
