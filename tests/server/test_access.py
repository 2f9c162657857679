"""Access checks: pages of other origins and foreign host names are refused."""

import httpx
import pytest
from server_of_tests import serving

BODY = {"prompt": "hello", "max_tokens": 1}


def ask(url, **headers):
    return httpx.post(f"{url}/v1/completions", json=BODY, headers={k.replace("_", "-"): v for k, v in headers.items()})


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "text/plain; application/json", ""]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/score", "/v1/rerank", "/tokenize"])
def test_body_without_preflight_is_refused(served, path, kind):
    answer = httpx.post(f"{served[1]}{path}", content=b'{"prompt": "hello"}', headers={"Content-Type": kind})
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON ; charset=utf-8"])
def test_json_body_is_accepted(served, kind):
    answer = httpx.post(f"{served[1]}/tokenize", content=b'{"prompt": "hello"}', headers={"Content-Type": kind})
    assert answer.status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "a b", "[::1", ""])
def test_rebound_host_name_is_refused(served, host):
    """DNS rebinding: the browser takes the page at that name and the server for the same origin."""
    for method, path in (("GET", "/"), ("GET", "/stats"), ("POST", "/v1/completions")):
        answer = httpx.request(method, f"{served[1]}{path}", headers={"Host": host, "Origin": f"http://{host}"})
        assert answer.status_code in (400, 403)
        if answer.status_code == 403:
            assert answer.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:1", "127.0.0.1:9", "[::1]:8080", "192.168.1.5", "box.lan", "BOX.lan"]
)
def test_allowed_hosts_are_accepted(engine, host):
    with serving(engine, allow_hosts=("box.lan",)) as (_, url):
        assert ask(url, Host=host).status_code == 200
        assert ask(url, Host=host, Origin=f"http://{host}").status_code == 200


def test_wildcard_allows_any_host(engine):
    with serving(engine, allow_hosts=("*",)) as (_, url):
        assert ask(url, Host="any.example").status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1", "http://localhost:1", "app://x"])
def test_foreign_origins_are_refused(served, origin):
    answer = ask(served[1], Origin=origin)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert httpx.get(f"{served[1]}/stats", headers={"Origin": origin}).status_code == 403


def test_allowed_origin_is_accepted(engine):
    for allowed, other in (("http://good.example", 403), ("*", 200)):
        with serving(engine, allow_origin=allowed) as (_, url):
            answer = ask(url, Origin="http://good.example")
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == allowed
            assert ask(url, Origin="http://other.example").status_code == other


@pytest.mark.parametrize("host", ["host.docker.internal:8080", "box.lan", "evil.example"])
def test_server_with_keys_accepts_any_host(engine, host):
    """A page that arrives by DNS rebinding cannot send a key that it does not know."""
    with serving(engine, api_keys={"one": "right"}) as (_, url):
        assert ask(url, Host=host, Authorization="Bearer right").status_code == 200
        assert ask(url, Host=host).status_code == 401
        assert ask(url, Host=host, Origin="http://other", Authorization="Bearer right").status_code == 403


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate"])
def test_a_compressed_body_is_refused_by_name(served, encoding):
    answer = ask(served[1], Content_Encoding=encoding)
    assert (answer.status_code, encoding in answer.json()["error"]["message"]) == (415, True)
