"""Credentials are detected in text and in option names."""

from __future__ import annotations

import time

import pytest

from megarl.core.credentials import has_credentials, is_secret_key, redacted
from tests.marks import exhaustive_but
from tests.timing import SCAN_CPU_S

LONG = "0aB" * 14


@pytest.mark.parametrize(
    "text",
    [
        "export HF_TOKEN=hf_x",
        "WANDB_API_KEY='abc' megarl",
        "export AWS_SECRET_ACCESS_KEY=abc",
        "--export=ALL,HF_TOKEN=abc",
        "huggingface-cli login --token abc",
        "docker login --password=abc",
        "docker://me:abc@host/image",
        'curl -H "Authorization: Bearer abc"',
        f"echo hf_{LONG} > file",
        f"login sk-{LONG}",
        f"ghp_{LONG}",
        "AKIA" + "A1" * 8,
        "-----BEGIN OPENSSH PRIVATE KEY-----",
        'api_key = "abcdefgh"',
        'password="hunter2"',
        "PASSWORD: str = 'hunter2'",
        'os.environ["HF_TOKEN"] = "abcd"',
        '{"api_key": "zzzz"}',
        "openai_api_key: 'abcd'",
        "WANDB_API_KEY: abcdef",
        "  HF_TOKEN:  'abcdef'",
    ],
)
def test_credentials_are_found(text: str) -> None:
    assert has_credentials(text)


@pytest.mark.parametrize(
    "text",
    [
        "export HF_TOKEN=$(cat ~/.hf_token)",
        'export HF_TOKEN="$MY_TOKEN"',
        "export HF_TOKEN=`cat token`",
        "--export=ALL,HF_TOKEN",
        "source ~/.secrets",
        "export HF_TOKEN_PATH=/home/me/token",
        "export GOOGLE_APPLICATION_CREDENTIALS=/home/me/key.json",
        "export TOKENIZERS_PARALLELISM=false",
        "https://me:$PASSWORD@host",
        "https://host:5000/a@b",
        "module load cuda",
        "You are good at basic arithmetic. Keep the password secret.",
        "runs/hf_checkpoint_step_000020_of_a_long_experiment_name",
        "--max-tokens 5",
        'EOS_TOKEN="</s>"',
        "PAD_TOKEN=0",
        "MAX_TOKEN=512",
        "--stop-token </s>",
        "EOS_TOKEN: abcd",
        '{"eos_token": "<|im_end|>", "image_token": "image"}',
        'api_key = os.environ["HF_TOKEN"]',
        "def score(password: str, api_key: str | None = None)",
        'OpenAI(base_url=url, api_key="EMPTY")',
        'api_key = ""',
        "HF_TOKEN: str | None = None",
        'password == "hunter2"',
        'password = "{password}"',
    ],
)
def test_other_text_has_no_credentials(text: str) -> None:
    assert not has_credentials(text)


@pytest.mark.parametrize(
    "key", ["api_key", "APIKEY", "hf_token", "smtp_password", "auth-token", "token", "client_secret"]
)
def test_secret_keys_are_recognized(key: str) -> None:
    assert is_secret_key(key)


@pytest.mark.parametrize("key", ["api_key_env", "stop_token", "eos_token", "turn_tokens", "password_file", "secrets"])
def test_other_keys_are_not_secret(key: str) -> None:
    assert not is_secret_key(key)


def test_passwords_in_urls_are_redacted() -> None:
    text = "request to https://me:hunter2@host:5000/api failed, https://host:5000 works"
    assert redacted(text) == "request to https://me:***@host:5000/api failed, https://host:5000 works"


UNITS = [
    "a",
    "A",
    "-",
    " ",
    "_",
    '"',
    "a:",
    "://",
    "://a:",
    "a--",
    "--a",
    "--token $",
    "TOKEN",
    "A_TOKEN= ",
    "password:",
]


REPEATED = (*UNITS, "authorization: ", "-----BEGIN ", "api_key= ", "A_", "@")


@pytest.mark.parametrize("unit", exhaustive_but(REPEATED, *REPEATED[::3]))
def test_long_texts_are_searched_in_linear_time(unit: str) -> None:
    text = unit * (2**20 // len(unit))
    start = time.process_time()
    assert not has_credentials(text) and redacted(text) == text
    assert time.process_time() - start < SCAN_CPU_S
