"""The dashboard: one page and its parts, served as they lie here. They hold no data and are open to everybody.

The page asks for a key when `/cache/feed` does. A policy forbids it to load or send anything anywhere else.
"""

from __future__ import annotations

import hashlib
from importlib import resources

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse

router = APIRouter(include_in_schema=False)

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@router.get("/dashboard")
def page(request: Request) -> Response:
    """The page itself."""
    return part(request, "index.html")


@router.get("/dashboard/")
def slash() -> Response:
    """Its parts are found from `/dashboard` only."""
    return RedirectResponse("../dashboard")


@router.get("/dashboard/{name}")
def part(request: Request, name: str) -> Response:
    """A script, a style sheet, a picture."""
    suffix = name[name.rfind(".") :]
    file = resources.files(__name__) / name
    if suffix not in TYPES or "/" in name or not file.is_file():
        raise HTTPException(404, f"the dashboard has no {name[:80]!r}")
    content = file.read_bytes()
    headers = {
        "cache-control": "no-cache",
        "content-security-policy": POLICY,
        "etag": f'"{hashlib.sha256(content).hexdigest()[:16]}"',
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=TYPES[suffix], headers=headers)
