"""Regenerate what is generated from the code: the API document, its examples, the tables in docs, the library.

`make openapi` runs this. With `--check`, write nothing and fail if anything would change.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args
from xml.sax.saxutils import quoteattr

from flow import flow
from functions import functions
from lessons import page_examples
from plain import plain
from promises import promises
from pydantic.fields import FieldInfo

from attention_service.attention.result import Result
from attention_service.attention.terms import CAUSES
from attention_service.backends.base import no_check
from attention_service.backends.registry import Backends
from attention_service.cli import parser
from attention_service.codecs.decoded import Decoded
from attention_service.codecs.table import CODECS
from attention_service.comparison.calls.mistakes import MISTAKES
from attention_service.comparison.candidates import MESSAGES
from attention_service.comparison.gradients.mutants import GRADIENT_MUTANTS
from attention_service.engines.table import FUNCTIONS
from attention_service.errors import error_classes
from attention_service.observability.metrics import Metrics
from attention_service.observability.requests import ComputedRequest, RequestRecord
from attention_service.pipeline.attention import PreparedRequest
from attention_service.pipeline.engine import Engine
from attention_service.rpc.calls import STATUSES
from attention_service.schemas.closed import Part
from attention_service.schemas.request import AttentionRequest
from attention_service.schemas.response import AttentionResponse, answer
from attention_service.settings import Settings, table

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT / "tests" / "cases"
PAGE = ROOT / "service" / "attention_service" / "page"
ROUTES = ROOT / "service" / "attention_service" / "routes"
PROTOCOLS = ("inference.proto", "health.proto")
INFERENCE = ROOT / "service" / "attention_service" / "codecs" / "oip"
# Characters of a line of the examples, unless an array takes more.
LINE = 120


def example_answer() -> str:
    """The answer to the first example of a request, to eight decimals: the last ones differ from machine to machine."""
    request, result = example(Engine(Settings.model_construct()))
    fields = answer(request.shared.spec, result, request_id="5f0c2a9e7d1b4e6f8a3c0d9b7e5f1a2c")
    return compact(json.loads(json.dumps(fields, default=lambda array: array.round(8).tolist()))) + "\n"


def example(engine: Engine) -> tuple[PreparedRequest, Result]:
    """The first example of a request in the API document, prepared, and its result."""
    first, *_ = json.loads((ROUTES / "compute_attention.json").read_text(encoding="utf-8")).values()
    prepared = engine.attention.prepare(CODECS["application/json"].decode(json.dumps(first["value"]).encode(), 2**20))
    return prepared, engine.attention.compute(prepared, no_check)


def compact(value: Any, indent: str = "") -> str:
    """JSON with an object's keys on lines of their own, unless the whole object or array fits into one line."""
    line = json.dumps(value, ensure_ascii=False)
    if len(indent + line) <= LINE or not isinstance(value, dict):
        return line
    inner = indent + " "
    items = (f"{inner}{json.dumps(key)}: {compact(item, inner)}" for key, item in value.items())
    return "{\n" + ",\n".join(items) + f"\n{indent}}}"


def readme_picture() -> str:
    """The weights of the request of docs/http.md."""
    request = json.loads((CASES / "animals_two_queries.json").read_text(encoding="utf-8"))["request"]
    return drawn({**request, "heatmap": {"title": ""}})


def sentence_picture() -> str:
    """The first picture of docs/heatmaps.md."""
    page = (ROOT / "docs" / "heatmaps.md").read_text(encoding="utf-8")
    return drawn(json.loads(page.partition("-d '")[2].partition("'\n")[0]))


def notebook_picture() -> str:
    """The first picture of docs/notebooks.md: of what its first program returns."""
    from attention_service.library import AttentionResult

    page = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    *before, last = page.partition("```python\n")[2].partition("```")[0].strip().splitlines()
    names: dict[str, Any] = {}
    exec("\n".join(before), names)  # noqa: S102  # the project's own page
    result = eval(last, names)  # noqa: S307
    assert isinstance(result, AttentionResult)
    return result.heatmap().svg


def drawn(fields: dict[str, Any]) -> str:
    """The SVG that `POST /attention/heatmap` returns for a request."""
    from attention_service.render.heatmap import Heatmap, make_heatmap_request

    untyped = frozenset(name for name, field in fields.items() if isinstance(field, list))
    return Heatmap(make_heatmap_request(Decoded(fields, untyped)), Backends().choose("numpy", "cpu")).svg


@cache
def document() -> str:
    """The API document, of a service with default settings."""
    from attention_service.app import (
        create_app,
    )  # only now: importing it reads the examples, which may just have been written

    return json.dumps(create_app(Settings.model_construct()).openapi(), indent=2, ensure_ascii=False) + "\n"


def older_document() -> str:
    """The same in OpenAPI 3.0."""
    return json.dumps(plain(json.loads(document())), indent=2, ensure_ascii=False) + "\n"


def promised() -> str:
    """What the document promises, and ever did: a line is taken out by hand, once the changelog says so."""
    path = ROOT / "openapi" / "promises.txt"
    before = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return "\n".join(sorted({*before, *promises(json.loads(document()))})) + "\n"


def compiled() -> bytes:
    """The protocols of gRPC in the form that protobuf's library reads."""
    from grpc_tools import protoc

    with TemporaryDirectory() as folder:
        file = Path(folder, "set")
        if protoc.main(["protoc", f"-I{INFERENCE}", f"--descriptor_set_out={file}", *PROTOCOLS]):
            sys.exit(f"{' or '.join(PROTOCOLS)} cannot be compiled")
        return file.read_bytes()


def statuses() -> str:
    """All error codes with their statuses over gRPC, as a Markdown table."""
    found: dict[str, list[str]] = {}
    for code, kind in error_classes().items():
        found.setdefault(STATUSES[kind.status], []).append(f"`{code}`")
    rows = [f"| `{status}` | {', '.join(codes)} |" for status, codes in found.items()]
    return "\n".join(["| status | codes |", "|---|---|", *rows])


def errors() -> str:
    """All error codes as a Markdown table."""
    rows = ["| code | status | when |", "|---|---|---|"]
    for code, kind in error_classes().items():
        rows.append(f"| `{code}` | {kind.status} | {kind.description()} |")
    return "\n".join(rows)


def known_mistakes() -> dict[str, str]:
    """What the kernel did, by the names of all known mistakes."""
    messages = MESSAGES | {name: mutant.message for name, mutant in GRADIENT_MUTANTS.items()}
    return messages | {name: mistake.message for name, mistake in MISTAKES.items()}


def mistakes() -> str:
    """All known mistakes of kernels as a Markdown table."""
    rows = [f"| `{name}` | {message} |" for name, message in sorted(known_mistakes().items())]
    return "\n".join(["| name | what the kernel did |", "|---|---|", *rows])


def with_count(page: Path) -> str:
    """A page whose link to the table of known mistakes says how many there are."""
    content = page.read_text(encoding="utf-8")
    content, count = re.subn(r"\[\d+( mistakes\]\((?:docs/)?mistakes\.md\))", rf"[{len(known_mistakes())}\1", content)
    if count != 1:
        sys.exit(f"{page}: {count} links that say how many mistakes are known")
    return content


def causes() -> str:
    """All that hides keys as a Markdown table."""
    rows = [f"| {cause.bit} | `{name}` | {cause.hides} |" for name, cause in CAUSES.items()]
    return "\n".join(["| bit | field | hides a key |", "|---|---|---|", *rows])


def reasons() -> str:
    """The sentences of the page that say why a key is hidden, as attributes of a template."""
    rows = [f"      data-{name}={quoteattr(cause.reason)}" for name, cause in CAUSES.items()]
    return "\n".join(["    <template", '      id="reasons"', *rows, "    ></template>"])


def tints() -> str:
    """The colours of the page for what hides a key, as properties of CSS."""
    return "\n".join(f"  --{name}: {cause.tint};" for name, cause in CAUSES.items())


def fields() -> str:
    """All fields of a request as a Markdown table; those of an object below the last field that is such an object."""
    rows, users = ["| field | meaning | default |", "|---|---|---|"], defaultdict[type[Part], list[str]](list)
    for name, field in AttentionRequest.model_fields.items():
        users[part_of(field)].append(name)
    for name, field in AttentionRequest.model_fields.items():
        part = part_of(field)
        is_alone, is_last = users[part] == [name], users[part][-1] == name
        rows.append(field_row(name, field, part.__doc__ if is_alone else ""))
        if part is Part or not is_last:
            continue
        if not is_alone:
            name = "…" + name[name.index("_") :]
            rows.append(f"| `{name}` | {marked(part.__doc__ or '')} | |")
        rows += [field_row(f"{name}.{inner}", field) for inner, field in part.model_fields.items()]
    return "\n".join(rows)


def part_of(field: FieldInfo) -> type[Part]:
    """The class of the object that a field is, `Part` if it is none."""
    return next(
        (kind for kind in get_args(field.annotation) if isinstance(kind, type) and issubclass(kind, Part)), Part
    )


def field_row(name: str, field: FieldInfo, more: str | None = "") -> str:
    """A row of a table of fields, whose meaning goes on with `more`."""
    text, _, default = " ".join((field.description or "").split()).partition(" Default: ")
    if not default and field.default is not None:
        default = f"`{json.dumps(field.default)}`"
    return f"| `{name}` | {marked(f'{text} {more}'.strip())} | {marked(default.rstrip('.'))} |"


def marked(text: str) -> str:
    """Text for a cell of a table, with the names of fields and results as code."""
    names = (
        part if n % 2 else re.sub(r"\b[a-z]+(_[a-z]+)+\b", r"`\g<0>`", part) for n, part in enumerate(text.split("`"))
    )
    return "".join(f"`{part}`" if n % 2 else part for n, part in enumerate(names)).replace("|", r"\|")


def results() -> str:
    """What `include` names, and the results beside it, as a Markdown table."""
    rows = [
        f"| `{name}` | {marked(str(field.description))} |"
        for name, field in AttentionResponse.model_fields.items()
        if field.description
    ]
    return "\n".join(["| result | meaning |", "|---|---|", *rows])


def engine_calls() -> str:
    """The functions of other libraries that `call` understands, and their arguments, as Markdown tables."""
    parts = []
    for library in dict.fromkeys(name.partition(".")[0] for name in FUNCTIONS):
        own = {name: function for name, function in FUNCTIONS.items() if name.startswith(f"{library}.")}
        users = defaultdict[tuple[str, str], list[str]](list)
        for function in own.values():
            for argument, row in function.rows.items():
                users[argument, row.text].append(f"{function.name} {', '.join(row.versions)}".strip())
        arguments = defaultdict[tuple[str, str], list[str]](list)
        for (argument, text), names in users.items():
            arguments["; ".join(names), text].append(f"`{argument}`")
        names = [f"- {function.name}: `{name}`" for name, function in own.items()]
        rows = [f"| {', '.join(alike)} | {of} | {marked(text)} |" for (of, text), alike in arguments.items()]
        parts += [
            f"### {library}",
            "\n".join(names),
            "\n".join(["| argument | of | meaning |", "|---|---|---|", *rows]),
        ]
    return "\n\n".join(parts)


def metrics() -> str:
    """All metrics as a Markdown table, with the names and labels that they have after a request."""
    engine = Engine(Settings.model_construct())
    counted = Metrics(engine.admission)
    record = RequestRecord("http", "POST", "/attention", "")
    record.timings = engine.start().timings
    record.computed = ComputedRequest("", "", example(engine)[1].metadata, 0)
    counted.request_answered(record)
    counted.update()
    rows = ["| metric | kind | labels | what |", "|---|---|---|---|"]
    for family in counted.registry.collect():
        name = family.name + "_total" * (family.type == "counter")
        labels = ", ".join(f"`{label}`" for label in family.samples[0].labels if label != "le")
        if name.startswith("attention_"):
            rows.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |")
    return "\n".join(rows)


def commands() -> str:
    """All commands and their flags as a Markdown table. argparse's own text changes from version to version."""
    (sub,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    helps = {action.dest: action.help for action in sub._choices_actions}
    rows = ["| command | what |", "|---|---|"]
    for name, command in sub.choices.items():
        arguments = [action for action in command._actions if action.dest != "help"]
        words = " ".join(str(action.metavar) for action in arguments if action.metavar and not action.option_strings)
        rows.append(f"| `attention-service {name}{' ' * bool(words)}{words}` | {helps[name]} |")
        rows += [f"| `{action.option_strings[0]}` | {action.help} |" for action in arguments if action.option_strings]
    return "\n".join(rows)


def filled(page: Path, name: str, text: str) -> str:
    """A page of Markdown, HTML or CSS with the part between its markers, which are comments, for `name` replaced."""
    pattern = re.compile(rf"((?:<!--|/\*) {name}: generated (?:-->|\*/)\n).*?( *(?:<!--|/\*) end )", re.DOTALL)
    content, count = pattern.subn(lambda found: f"{found[1]}{text}\n{found[2]}", page.read_text(encoding="utf-8"))
    if count != 1:
        sys.exit(f"{page}: {count} places for {name}")
    return content


def write(path: Path, content: str | bytes) -> bool:
    """Whether the file was as it should be; unless checking, it is afterwards."""
    data = content if isinstance(content, bytes) else content.encode()
    same = path.exists() and path.read_bytes() == data
    if not same and "--check" not in sys.argv:
        path.write_bytes(data)
    return same


def main() -> None:
    """Write everything, the example of an answer first: the document holds it."""
    docs = ROOT / "docs"
    protocol = docs / "inference-protocol.md"
    changed = []
    made: tuple[tuple[Path, Callable[[], str | bytes]], ...] = (
        (ROOT / "service" / "attention_service" / "library" / "functions.py", functions),
        (INFERENCE / "inference.binpb", compiled),
        (ROUTES / "answer.json", example_answer),
        (ROOT / "openapi" / "openapi.json", document),
        (docs / "images" / "animals.svg", readme_picture),
        (docs / "images" / "sentence.svg", sentence_picture),
        (docs / "images" / "notebook.svg", notebook_picture),
        (ROOT / "openapi" / "openapi-3.0.json", older_document),
        (ROOT / "openapi" / "promises.txt", promised),
        (docs / "settings.md", lambda: filled(docs / "settings.md", "settings", table())),
        (docs / "commands.md", lambda: filled(docs / "commands.md", "commands", commands())),
        (docs / "operations.md", lambda: filled(docs / "operations.md", "metrics", metrics())),
        (docs / "errors.md", lambda: filled(docs / "errors.md", "errors", errors())),
        (docs / "coming-from.md", lambda: filled(docs / "coming-from.md", "calls", engine_calls())),
        (docs / "mistakes.md", lambda: filled(docs / "mistakes.md", "mistakes", mistakes())),
        (ROOT / "README.md", lambda: with_count(ROOT / "README.md")),
        (docs / "exactness.md", lambda: with_count(docs / "exactness.md")),
        (docs / "attention.md", lambda: filled(docs / "attention.md", "fields", fields())),
        (docs / "attention.md", lambda: filled(docs / "attention.md", "results", results())),
        (docs / "attention.md", lambda: filled(docs / "attention.md", "causes", causes())),
        (PAGE / "examples.json", page_examples),
        (PAGE / "index.html", lambda: filled(PAGE / "index.html", "reasons", reasons())),
        (PAGE / "page.css", lambda: filled(PAGE / "page.css", "tints", tints())),
        (protocol, lambda: filled(protocol, "statuses", statuses())),
        (ROOT / "CONTRIBUTING.md", lambda: filled(ROOT / "CONTRIBUTING.md", "flow", flow())),
    )
    for path, make in made:
        if not write(path, make()):
            changed.append(str(path.relative_to(ROOT)))
    print("\n".join(f"changed: {name}" for name in changed) or "everything is up to date")
    if changed and "--check" in sys.argv:
        sys.exit("run `make openapi`")


if __name__ == "__main__":
    main()
