"""The page at /, from files in `service/attention_service/page`, and the API document: cached and compressed."""

from __future__ import annotations

import gzip
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import orjson
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.staticfiles import NotModifiedResponse, StaticFiles

from attention_service.errors import NotFound

router = APIRouter(include_in_schema=False)

# In Accept-Encoding: gzip, unless its weight is 0, which refuses it (RFC 9110, section 12.5.3).
ACCEPTS_GZIP: Final = re.compile(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))", re.IGNORECASE)
FOLDER: Final = Path(__file__).parents[1] / "page"
MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
}
# The page loads nothing from elsewhere, and runs no script but its own modules.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# Decides on conditional requests. The files themselves are sent from memory, each as its ETag says.
static: Final = StaticFiles(directory=FOLDER)


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page, or the API document, as it is sent."""

    content: bytes
    headers: dict[str, str]

    @classmethod
    def of(cls, content: bytes, media_type: str, encoding: str, **headers: str) -> PageFile:
        """The file, compressed if `encoding` is gzip, with an ETag by which a browser asks whether it has changed."""
        headers["Vary"] = "Accept-Encoding"
        if encoding:
            content, headers["Content-Encoding"] = gzip.compress(content, mtime=0), encoding
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        return cls(content, {"Content-Type": media_type, "Cache-Control": "no-cache", "ETag": etag, **headers})


@cache
def page_files(encoding: str = "") -> dict[str, PageFile]:
    """The files of the page by name, as they are, or compressed by gzip. They are read once for each encoding."""
    headers = {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer"}
    paths = (path for path in sorted(FOLDER.iterdir()) if path.suffix in MEDIA_TYPES)
    return {path.name: PageFile.of(path.read_bytes(), MEDIA_TYPES[path.suffix], encoding, **headers) for path in paths}


def accepted_encoding(request: Request) -> str:
    """gzip if the client can read that, else no encoding: ""."""
    return "gzip" if ACCEPTS_GZIP.search(request.headers.get("Accept-Encoding", "")) else ""


def respond(file: PageFile, request: Request) -> Response:
    """The file, or 304 without a body if the client has it."""
    headers = Headers(file.headers)
    if static.is_not_modified(headers, request.headers):
        return NotModifiedResponse(headers)
    return Response(file.content, headers=file.headers)


@router.get("/")
async def get_page(request: Request) -> Response:
    """Returns the page."""
    return respond(page_files(accepted_encoding(request))["index.html"], request)


def add_document(app: FastAPI) -> None:
    """Serve the API document in the place of FastAPI's route: compressed if the client can read that, with an ETag."""

    @cache
    def document(root_path: str, encoding: str) -> PageFile:
        described = app.openapi()
        if root_path:  # as FastAPI does it: where the server runs behind a prefix
            described = {**described, "servers": [{"url": root_path}, *described["servers"]]}
        return PageFile.of(orjson.dumps(described), "application/json", encoding)

    async def get_document(request: Request) -> Response:
        root_path = request.scope.get("root_path", "").rstrip("/")
        return respond(document(root_path, accepted_encoding(request)), request)

    app.router.routes.insert(0, Route("/openapi.json", get_document, include_in_schema=False))


@router.get("/page/{name}")
async def get_page_file(name: str, request: Request) -> Response:
    """Returns a file of the page: a style sheet, a module, the examples."""
    file = page_files(accepted_encoding(request)).get(name)
    if file is None:
        raise NotFound.at("", "a file of the page", "another name")
    return respond(file, request)
