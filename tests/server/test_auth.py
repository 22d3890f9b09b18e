"""Keys let in, tenants are apart, and nobody sees what is not theirs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from octavo import AsyncEngine
from octavo.errors import ConfigError
from octavo.server.config import ServerConfig, tenant_of_key
from support.serving import Served, serving

KEYS = {"key-of-a": "a", "key-of-b": "b"}
PROMPT = [n % 256 for n in range(100, 900)]
OPERATED = (("GET", "/metrics"), ("GET", "/cache"), ("POST", "/reset_prefix_cache"))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def complete(served: Served, key: str, **more: Any) -> Mapping[str, Any]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2, "seed": 1, **more}
    with served.client(headers=bearer(key)) as client:
        found = client.post("/v1/completions", json=body)
        assert found.status_code == 200, found.text
        answer: Mapping[str, Any] = found.json()
        return answer


def forget(served: Served) -> None:
    served.ask(lambda engine: engine.reset_prefix_cache())


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer nobody"},
        {"authorization": "Bearer"},
        {"authorization": "key-of-a"},
        {"authorization": "Basic key-of-a"},
        {"authorization": "Bearer key-of-a2"},
        {"authorization": "Bearer key-of-"},
        {"x-api-key": "nobody"},
        {"x-api-key": ""},
    ],
)
def test_without_a_valid_key_there_is_no_answer(tiny_engine: AsyncEngine, headers: dict[str, str]) -> None:
    with serving(tiny_engine, api_keys=KEYS) as served, served.client(headers=headers) as client:
        for method, path in (
            *OPERATED,
            ("GET", "/v1/models"),
            ("POST", "/v1/completions"),
            ("GET", "/nowhere"),
        ):
            found = client.request(method, path)
            assert (found.status_code, found.headers["www-authenticate"]) == (401, "Bearer")
            assert found.json()["error"]["code"] == "invalid_api_key"
            assert found.headers["x-request-id"]
        found = client.post("/v1/messages", json={})
        assert found.json()["error"]["type"] == "authentication_error"


def test_open_routes_need_no_key(tiny_engine: AsyncEngine) -> None:
    with serving(tiny_engine, api_keys=KEYS) as served, served.client() as client:
        for path in ("/health", "/version", "/openapi.json", "/dashboard"):
            assert client.get(path).status_code == 200, path
        schemes = client.get("/openapi.json").json()["components"]["securitySchemes"]
        assert schemes["bearer"] == {"type": "http", "scheme": "bearer"}


def test_both_headers_are_read(tiny_engine: AsyncEngine) -> None:
    with serving(tiny_engine, api_keys=KEYS) as served, served.client() as client:
        for headers in (bearer("key-of-b"), {"authorization": "bearer key-of-b"}, {"x-api-key": "key-of-b"}):
            assert client.get("/v1/models", headers=headers).status_code == 200


def test_tenants_share_no_prefix(tiny_engine: AsyncEngine) -> None:
    with serving(tiny_engine, api_keys={**KEYS, "second-of-a": "a"}) as served:
        forget(served)
        complete(served, "key-of-a")
        other, own = complete(served, "key-of-b"), complete(served, "second-of-a")
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert other["octavo"]["computed_tokens"] == len(PROMPT)
        assert own["usage"]["prompt_tokens_details"]["cached_tokens"] == 784
        assert own["choices"][0]["text"] == other["choices"][0]["text"]


def test_a_receipt_does_not_tell_of_other_tenants(tiny_engine: AsyncEngine) -> None:
    with serving(tiny_engine, api_keys=KEYS) as served:
        forget(served)
        cold = complete(served, "key-of-b")["octavo"]["miss"]
        forget(served)
        complete(served, "key-of-a")
        assert complete(served, "key-of-b")["octavo"]["miss"] == cold


def test_tenants_share_prefixes_where_they_were_told_to(tiny_engine: AsyncEngine) -> None:
    with serving(tiny_engine, api_keys=KEYS, share_prefixes=True) as served:
        forget(served)
        complete(served, "key-of-a")
        assert complete(served, "key-of-b")["usage"]["prompt_tokens_details"]["cached_tokens"] == 784
        salted = complete(served, "key-of-b", cache_salt="own")
        assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_what_concerns_all_needs_the_admin_key(tiny_engine: AsyncEngine) -> None:
    with serving(tiny_engine, api_keys=KEYS, admin_key="root") as served:
        for method, path in OPERATED:
            with served.client(headers=bearer("key-of-a")) as client:
                found = client.request(method, path)
                assert (found.status_code, found.json()["error"]["code"]) == (403, "forbidden")
            with served.client(headers=bearer("root")) as client:
                assert client.request(method, path).status_code == 200
        assert complete(served, "root")["usage"]["prompt_tokens"] == len(PROMPT)


def test_without_an_admin_key_only_a_lone_tenant_is_the_operator(tiny_engine: AsyncEngine) -> None:
    for keys, status in ((KEYS, 403), ({"key-of-a": "a"}, 200), ({"key-of-a": "a", "again": "a"}, 200)):
        with (
            serving(tiny_engine, api_keys=keys) as served,
            served.client(headers=bearer("key-of-a")) as client,
        ):
            for method, path in OPERATED:
                assert client.request(method, path).status_code == status
    with serving(tiny_engine) as served, served.client() as client:
        for method, path in OPERATED:
            assert client.request(method, path).status_code == 200


def test_keys_are_in_no_log_and_no_metric(tiny_engine: AsyncEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with serving(tiny_engine, api_keys={"topsecret": tenant_of_key("topsecret")}) as served:
        complete(served, "topsecret")
        with served.client(headers=bearer("topsecret")) as client:
            text = client.get("/metrics").text
        with served.client(headers=bearer("wrongsecret")) as client:
            client.get("/metrics")
        shown = repr(served.state.config)
    logged = [record.getMessage() for record in caplog.records]
    assert any(tenant_of_key("topsecret") in line for line in logged)
    assert not [line for line in [*logged, text, shown] if "topsecret" in line or "wrongsecret" in line]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "same-origin", "origin": "https://behind.a.proxy"}, 200),
        ({"origin": "http://SELF"}, 200),
        ({}, 200),
    ],
)
def test_a_page_of_another_site_cannot_use_the_server(
    served: Served, headers: dict[str, str], status: int
) -> None:
    with served.client() as client:
        host = client.base_url.netloc.decode()
        headers = {name: value.replace("SELF", host) for name, value in headers.items()}
        assert client.post("/reset_prefix_cache", headers=headers).status_code == status
        assert client.post("/tokenize", json={"prompt": "a"}, headers=headers).status_code == status


def test_a_file_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# tenants\n\nred  k1\nred k2\n  blue\tk3\n")
    config = ServerConfig.create(api_key=["k4"], api_key_file=file, max_body="1MiB")
    assert config.api_keys == {"k1": "red", "k2": "red", "k3": "blue", "k4": tenant_of_key("k4")}
    assert config.max_body == 1024**2
    assert "k4" not in tenant_of_key("k4")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("red\n", "line 1 is not `tenant key`"),
        ("red k1\nblue k1\n", "line 2 is the key of another line again"),
        ("# nothing\n", "holds no keys"),
        ("admin k1\n", "is that of --admin-key"),
        ("red schlüssel\n", "printable ASCII"),
        (None, "cannot be read"),
    ],
)
def test_a_file_of_keys_that_is_wrong(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as error:
        ServerConfig.create(api_key_file=file)
    assert words in str(error.value)
    assert "k1" not in str(error.value).replace(str(file), "")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"api_key": ["a b"]}, "printable ASCII"),
        ({"api_key": [""]}, "printable ASCII"),
        ({"api_key": ["a"], "admin_key": "a"}, "also a tenant's"),
        ({"share_prefixes": True}, "does nothing without keys"),
        ({"port": 70000}, "port=70000"),
        ({"body_timeout": 0}, "body_timeout=0"),
        ({"max_body": "2GiB"}, "max_bodies"),
        ({"max_connections": 0}, "max_connections=0"),
        ({"served_model_names": ("",)}, "must not be empty"),
    ],
)
def test_impossible_servers_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        ServerConfig.create(**options)
    assert words in str(error.value)
