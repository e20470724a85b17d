"""Is an address what a person meant, and is what it must not be refused in one sentence?"""

from __future__ import annotations

import pytest

from membound.roofline.errors import MemboundError
from membound.runtime.endpoint.address import Endpoint


@pytest.mark.parametrize(
    ("url", "base_url", "api"),
    [
        ("http://h:8000", "http://h:8000/v1", None),
        ("http://h:8000/", "http://h:8000/v1", None),
        ("http://h:8000/v1", "http://h:8000/v1", None),
        ("https://h/api/v2/", "https://h/api/v2", None),
        ("http://h/v1/completions", "http://h/v1", "completions"),
        ("http://h/v1/chat/completions/", "http://h/v1", "chat"),
        ("http://[::1]:8000", "http://[::1]:8000/v1", None),
    ],
)
def test_a_server_its_version_and_its_paths_are_all_addresses(url: str, base_url: str, api: str | None) -> None:
    endpoint = Endpoint.of(url)
    assert (endpoint.base_url, endpoint.api) == (base_url, api)
    assert endpoint.url("chat") == f"{base_url}/chat/completions"


def test_metrics_lie_beside_the_versioned_paths() -> None:
    assert Endpoint.of("http://h:8000").metrics_url == "http://h:8000/metrics"
    assert Endpoint.of("http://h/models/a/v1").metrics_url == "http://h/models/a/metrics"


@pytest.mark.parametrize(
    "url",
    [
        *("", "h:8000", "ftp://h", "file:///etc/passwd", "http://", "http://h:99999", "http://h:0", "http://h/v1?a=b"),
        *("http://h/\r\nx: y", "http://h /v1", "http://[::1", "javascript:alert(1)", "http://é/"),
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(MemboundError, match=r"^option --endpoint is .*such as http://127\.0\.0\.1:8000$"):
        Endpoint.of(url)


def test_a_password_in_the_address_is_refused_without_being_repeated() -> None:
    with pytest.raises(MemboundError, match=r"--api-key-env") as error:
        Endpoint.of("http://me:hunter2@h")
    assert "hunter2" not in str(error.value)


def test_the_key_comes_from_the_environment_and_is_not_shown(monkeypatch) -> None:
    monkeypatch.setenv("KEY_OF_MINE", "abc-123")
    endpoint = Endpoint.of("http://h", api_key_env="KEY_OF_MINE")
    assert endpoint.api_key == "abc-123"
    assert "abc-123" not in repr(endpoint)
    assert endpoint.hidden("bad key abc-123") == "bad key (key)"


@pytest.mark.parametrize("value", ["", "a b", "a\nb", "ключ"])
def test_a_key_that_no_header_can_hold_is_refused(monkeypatch, value: str) -> None:
    monkeypatch.setenv("KEY_OF_MINE", value)
    with pytest.raises(MemboundError, match="KEY_OF_MINE"):
        Endpoint.of("http://h", api_key_env="KEY_OF_MINE")


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e9])
def test_patience_is_a_number_of_seconds(seconds: float) -> None:
    with pytest.raises(MemboundError, match="--endpoint-timeout"):
        Endpoint.of("http://h", patience_s=seconds)
