"""The page as one file with its numbers, which opens without a server and loads nothing: result.page("it.html")."""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from attention_service.attention.plan import Plan
from attention_service.attention.planning import make_plan
from attention_service.attention.spec import AttentionSpec, Output
from attention_service.backends.registry import Backends
from attention_service.codecs import typed_arrays
from attention_service.render.picture import key_labels
from attention_service.schemas.response import answer

FOLDER: Final = Path(__file__).parents[1] / "page"
# Queries, keys, and scores of all heads that the page draws; it asks the service to draw longer sequences.
LONGEST: Final = 512
MOST_SCORES: Final = 2**20
# The results that the page has pictures of, by their names in a request and in `index.html`.
STAGES: Final[tuple[Output, ...]] = (
    "scores",
    "scaled_scores",
    "capped_scores",
    "masked_scores",
    "attention_weights",
    "hidden_by",
    "query",
    "present_key",
    "present_value",
    "head_outputs",
)
# The gradient that is a stage, too, if a request has what it is computed from.
GRADIENT: Final[Output] = "grad_masked_scores"
# Fields that the page does not show, or that would leave out its numbers, with their values.
LEFT_OUT: Final[Mapping[str, Any]] = {
    "include": STAGES,
    "gradients": None,
    "select_heads": None,
    "select_queries": None,
    "average_heads": False,
    "top_k": None,
}
OWN: Final = {*LEFT_OUT, "untyped", "allow_non_finite", "backend", "device"}
TITLE: Final = "Attention, step by step"
# What the page looks at first, as in `app.js`.
CHOICE: Final = {
    **dict.fromkeys(("layer", "batch", "head", "query", "key", "feature"), 0),
    "stage": "attention_weights",
    "colours": "",
    "first": "",
}
# Unpacks style, numbers and modules: deflated and in base64 they take half of the space.
LOADER: Final = """
const packed = document.getElementById("deflated");
const bytes = Uint8Array.from(atob(packed.textContent), (letter) => letter.charCodeAt(0));
const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
const texts = JSON.parse(await new Response(stream).text());
for (const [tag, attributes, text] of texts) {
	const part = Object.assign(document.createElement(tag), attributes, { textContent: text });
	part.nonce = packed.nextElementSibling.nonce;
	packed.before(part);
}
packed.remove();
"""


def page_of_request(spec: AttentionSpec, plan: Plan) -> str:
    """The page that the service saves for this request, as HTML. Errors: ValueError for more than a page draws."""
    check_size(plan)
    spec = spec._replace(**LEFT_OUT)
    if spec.has_gradients:
        spec = spec._replace(include=(*STAGES, GRADIENT))
    plan = make_plan(spec)
    found = Backends().choose(spec.backend, spec.device).program(plan, spec)(spec.sources, None)
    request = {name: _plain(field) for name, field in spec._asdict().items() if name not in OWN and field is not None}
    if (labels := key_labels(spec, plan)) is not None:
        request["key_tokens"] = labels
    answered = answer(spec._replace(key_tokens=request.get("key_tokens")), found, "")
    tensors = {name: _plain(answered.pop(name)) for name in found.arrays}
    options = {name: field for name, field in request.items() if not isinstance(field, orjson.Fragment)}
    layer = {"request": request | {"include": spec.include}, "answer": answered, "tensors": tensors}
    return html({"layers": [layer], "request": options | {"layout": plan.layout}}, has_batch=plan.sizes.batch_size > 1)


def html(saved: Mapping[str, Any], title: str = TITLE, *, has_batch: bool = False) -> str:
    """The page with these contents, as HTML.

    saved: `layers`, each with its request, its answer and its tensors, and what else `restore` of `app.js` reads, as
        orjson writes it
    has_batch: True to let the user choose a batch entry
    """
    content = {
        "base": "http://127.0.0.1:8000/",
        "source": {"example": "data"},
        "choice": CHOICE,
        "request": {},
        **saved,
    }
    text = orjson.dumps(content).decode()
    page = re.sub("^ +", "", (FOLDER / "index.html").read_text(encoding="utf-8"), flags=re.MULTILINE)
    names = re.findall(r'rel="modulepreload" href="page/(.*)"', page)
    modules = "".join((FOLDER / name).read_text(encoding="utf-8") for name in names)
    modules = re.sub(r"^[ \t]*/\*\*.*?\*/\n", "", modules, flags=re.MULTILINE | re.DOTALL)  # types, for tsc alone
    script = re.sub(r"^export ", "", re.sub(r"^import .*$", "", modules, flags=re.MULTILINE), flags=re.MULTILINE)
    parts = [
        ["style", {}, (FOLDER / "page.css").read_text(encoding="utf-8")],
        ["script", {"type": "application/json", "id": "saved"}, text],
        ["script", {"type": "module"}, script],
    ]
    packed = base64.b64encode(zlib.compress(orjson.dumps(parts), 6)).decode()
    nonce = hashlib.sha256(packed.encode()).hexdigest()[:32]  # the same page for the same numbers
    policy = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data: blob:"
    page = re.sub(
        r"<(?:link rel=\"(?:modulepreload|preload|stylesheet)|script |a href=\"docs|!-- In the order).*\n", "", page
    )
    page = page.replace(TITLE, escape(title))
    if has_batch:
        page = page.replace('<label id="batch-label" hidden>', '<label id="batch-label">')
    style = f'<style nonce="{nonce}">body:has(#deflated) {{ visibility: hidden; }}</style>'  # until it has its own
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n{style}\n</head>'
    data = f'<script type="text/plain" id="deflated">{packed}</script>'
    tail = f'{data}<script type="module" nonce="{nonce}">{LOADER}</script>\n</body>'
    return page.replace("</head>", head, 1).replace("</body>", tail, 1)


def check_size(plan: Plan) -> None:
    """Check that the page draws so many numbers. Errors: ValueError."""
    heads, _, batch, queries, keys, *_ = plan.sizes
    if max(queries, keys) > LONGEST or batch * heads * queries * keys > MOST_SCORES:
        raise ValueError(
            f"a page shows up to {LONGEST} queries and keys, and {MOST_SCORES:,} scores of all heads; got {queries} "
            f"queries, {keys} keys, {heads} heads, {batch} batch entries"
        )


def _plain(value: Any) -> Any:
    """A field of a specification as JSON has it, arrays as typed arrays."""
    if isinstance(value, np.ndarray):
        return orjson.Fragment(b"".join(typed_arrays.chunks(value)))
    if not is_dataclass(value):
        return value
    parts = {part.name: getattr(value, part.name) for part in fields(value)}
    return {name: _plain(field) for name, field in parts.items() if field is not None}
