"""What every request goes through, whatever it asks for: ids, errors, keys."""

from __future__ import annotations

from support.serving import Served


def test_unknown_paths_and_methods_are_errors_of_openais_form(served: Served) -> None:
    with served.client() as client:
        missing = client.get("/v1/nothing")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "not_found"
        wrong = client.post("/openapi.json", json={})
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "HEAD, GET")
        assert wrong.json()["error"]["code"] == "method_not_allowed"
