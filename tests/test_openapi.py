"""The API document is valid and up to date, real responses follow it, and its examples run."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
import jsonschema
import numpy as np
import pytest
from openapi_spec_validator import OpenAPIV30SpecValidator, OpenAPIV31SpecValidator
from pydantic import BaseModel

from attention_service.codecs.table import CODECS
from attention_service.errors import error_classes
from attention_service.schemas.closed import Part
from attention_service.schemas.inference import InferenceInput, InferenceRequest, InferenceRequestedOutput
from attention_service.schemas.request import AttentionRequest
from tests.cases import CASES
from tests.conftest import app, serving
from tests.test_auth import HASH
from tests.test_bad_requests import BAD

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = re.compile(r'"#/components/(\w+)/([\w-]+)"')
DOCUMENT: dict[str, Any] = json.loads((ROOT / "openapi" / "openapi.json").read_text(encoding="utf-8"))
OPERATIONS = {operation["operationId"]: operation for path in DOCUMENT["paths"].values() for operation in path.values()}


def component(node: dict[str, Any]) -> dict[str, Any]:
    """What a reference to a component refers to; any other node itself."""
    if "$ref" not in node:
        return node
    _, _, kind, name = node["$ref"].split("/")
    found: dict[str, Any] = DOCUMENT["components"][kind][name]
    return found


def fields(name: str) -> dict[str, Any]:
    """The fields of a schema, with those of the schema that it extends."""
    schema = DOCUMENT["components"]["schemas"][name]
    bases = [component(base)["properties"] for base in schema.get("allOf", ())]
    return {key: field for properties in [*bases, schema.get("properties", {})] for key, field in properties.items()}


def components(node: Any) -> set[str]:
    """All components that a node refers to, those that these refer to with them, as `schemas/Tensor`."""
    found: set[str] = set()
    new = {"/".join(reference) for reference in REFERENCE.findall(json.dumps(node))}
    while new:
        found |= new
        texts = [json.dumps(DOCUMENT["components"][kind][name]) for kind, name in (place.split("/") for place in new)]
        new = {"/".join(reference) for text in texts for reference in REFERENCE.findall(text)} - found
    return found


def size(node: Any, shared: set[str] | None = None) -> int:
    """Bytes of a node as it is served, and of the components that it refers to, but for shared ones."""
    places = [place.split("/") for place in components(node) - (shared or set())]
    parts = [node, *(DOCUMENT["components"][kind][name] for kind, name in places)]
    return sum(len(json.dumps(part, ensure_ascii=False, separators=(",", ":")).encode()) for part in parts)


def test_generated_files_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "openapi" / "generate.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_damaged_generated_sections_are_found_and_restored(tmp_path: Path) -> None:
    """--check finds a damaged section or compiled file that is generated, and the generator restores it."""
    for folder in (
        "openapi",
        "docs",
        "tests/cases",
        "service/attention_service/codecs",
        "service/attention_service/library",
        "service/attention_service/page",
        "service/attention_service/routes",
    ):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for name in ("CONTRIBUTING.md", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    marked: dict[str, Path] = {}
    section = r"(?:<!--|/\*) (\w+): generated (?:-->|\*/)\n.*?\n *(?:<!--|/\*) end "
    for page in sorted(path for path in tmp_path.rglob("*") if path.suffix in {".md", ".html", ".css"}):
        text = page.read_text(encoding="utf-8")
        marked |= dict.fromkeys(re.findall(section, text, flags=re.DOTALL), page)
        page.write_text(
            re.sub(r"(: generated (?:-->|\*/)\n).*?(\n *(?:<!--|/\*) end )", r"\1\2", text, flags=re.DOTALL)
        )
    sections = {
        "calls",
        "settings",
        "commands",
        "metrics",
        "errors",
        "statuses",
        "flow",
        "mistakes",
        "causes",
        "reasons",
        "tints",
        "fields",
        "results",
    }
    assert marked.keys() == sections
    whole = [
        tmp_path / "service" / "attention_service" / name
        for name in ("codecs/oip/inference.binpb", "library/functions.py")
    ]
    for file in whole:
        file.write_bytes(b"")
    command = [sys.executable, str(tmp_path / "openapi" / "generate.py")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    found, made = (
        subprocess.run([*command, *flag], env=environment, capture_output=True, text=True, check=False)
        for flag in (["--check"], [])
    )
    changed = {f"changed: {page.relative_to(tmp_path)}" for page in [*whole, *marked.values()]}
    assert (found.returncode, set(found.stdout.split("\n")[:-1])) == (1, changed)
    assert made.returncode == 0
    for page in [*whole, *marked.values()]:
        assert page.read_bytes() == (ROOT / page.relative_to(tmp_path)).read_bytes()


def test_every_broken_promise_is_in_the_changelog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "openapi"))  # the check imports a module beside it
    promised = set((ROOT / "openapi" / "promises.txt").read_text(encoding="utf-8").splitlines())
    check = runpy.run_path(str(ROOT / "openapi" / "promises.py"))
    assert check["broken"](promised, DOCUMENT, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")) == []
    changed = json.loads(json.dumps(DOCUMENT))
    del changed["components"]["schemas"]["AttentionRequest"]["properties"]["scale"]
    changed["components"]["schemas"]["Layout"]["enum"].remove("ld")
    lost = check["broken"](promised, changed, "### Removed\n\n- `Layout`: `ld` is gone.\n")
    extended = {f"{name}.scale" for name in ("AttentionRequest", "CompareRequest", "HeatmapRequest")}
    assert {line.partition(":")[0] for line in lost} == {"Layout", *extended}
    named = ", ".join(f"`{name}`" for name in ("Layout", *sorted(extended)))
    told = check["broken"](promised, changed, f"\n### Removed\n\n- {named}.\n")
    assert told == []


def test_the_openapi_3_0_document_is_valid() -> None:
    """The document is for generators that do not support OpenAPI 3.1."""
    older = json.loads((ROOT / "openapi" / "openapi-3.0.json").read_text(encoding="utf-8"))
    OpenAPIV30SpecValidator(older).validate()
    assert "anyOf" not in json.dumps(older)
    operations = {operation["operationId"] for path in older["paths"].values() for operation in path.values()}
    assert operations == set(OPERATIONS)


def inner(node: Any, where: str) -> Iterator[str]:
    """The places below a node with titles, or with objects or enumerations that have no name of their own."""
    if isinstance(node, list):
        for i, item in enumerate(node):
            yield from inner(item, f"{where}/{i}")
    elif isinstance(node, dict):
        if "enum" in node or "properties" in node or isinstance(node.get("title"), str):
            yield where
        for key, value in node.items():
            yield from inner(value, f"{where}/{key}")


def test_all_types_have_names() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    below = [
        schema.get("properties", {}).get(field) for schema in schemas.values() for field in schema.get("properties", {})
    ]
    assert list(inner(below, "")) == []
    assert not any("title" in schema and "properties" not in schema for schema in schemas.values())


def test_no_type_hides_one_of_a_language() -> None:
    """Generated code uses its language's own types beside those of the document."""
    own = {"Any", "Array", "Boolean", "Date", "Dict", "Error", "List", "Map", "Number", "Object", "Promise", "Record",
           "Result", "Set", "String", "Vec"}  # fmt: skip
    assert not own & DOCUMENT["components"]["schemas"].keys()


def test_arrays_have_one_type_in_requests_and_responses() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    options = [{"$ref": f"#/components/schemas/{name}"} for name in ("EncodedTensor", "NestedTensor")]
    assert schemas["Tensor"]["anyOf"] == options
    assert schemas["EncodedTensor"]["required"] == ["dtype", "shape", "data"]
    assert (schemas["NestedTensor"]["type"], schemas["NestedTensor"]["items"]) == ("array", {})
    tensor = {"$ref": "#/components/schemas/Tensor"}
    assert schemas["AttentionResponse"]["properties"]["output"].items() >= tensor.items()
    assert tensor in schemas["AttentionRequest"]["properties"]["query"]["anyOf"]


def test_problem_codes_are_one_enumeration() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    assert schemas["ProblemCode"]["enum"] == list(error_classes())
    for name in ("Problem", "ProblemFault", "ProblemType"):
        assert schemas[name]["properties"]["code"]["$ref"] == "#/components/schemas/ProblemCode"


def test_numbers_are_double() -> None:
    """A number without a format is float32 in Go."""
    numbers = re.findall(r'{[^{}]*"type": "number"[^{}]*}', json.dumps(DOCUMENT["components"]))
    assert numbers
    assert all('"format": "double"' in number for number in numbers)


def test_the_document_is_valid() -> None:
    assert DOCUMENT["openapi"].startswith("3.1")
    OpenAPIV31SpecValidator(DOCUMENT).validate()


def test_the_server_serves_the_document(client: httpx.Client) -> None:
    assert client.get("/openapi.json").json() == DOCUMENT


def test_the_document_is_compressed_and_conditional(client: httpx.Client) -> None:
    with client.stream("GET", "/openapi.json", headers={"Accept-Encoding": "gzip"}) as response:
        packed = b"".join(response.iter_raw())
    assert response.headers["content-encoding"] == "gzip"
    assert len(packed) <= 30_000
    assert json.loads(gzip.decompress(packed)) == DOCUMENT
    plain = client.get("/openapi.json", headers={"Accept-Encoding": "identity"})
    assert ("content-encoding" in plain.headers, plain.json()) == (False, DOCUMENT)
    assert plain.headers["vary"] == response.headers["vary"] == "Accept-Encoding"
    tags = {"gzip": response.headers["etag"], "identity": plain.headers["etag"]}
    assert len(set(tags.values())) == 2, "each is a representation of its own"
    for method in ("GET", "HEAD"):
        for encoding, tag in tags.items():
            headers = {"Accept-Encoding": encoding, "If-None-Match": tag}
            again = client.request(method, "/openapi.json", headers=headers)
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert client.get("/openapi.json", headers={"If-None-Match": '"old"'}).status_code == 200


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [("GZIP", "gzip"), ("br, gzip;q=0.1", "gzip"), ("gzip; q=1.0, br", "gzip"), ("gzip;q=0", None),
     ("identity, gzip;q=0.0", None), ("gzip ; q=0, *", None), ("xgzip", None), ("", None)],
)  # fmt: skip
def test_a_refused_encoding_is_not_used(client: httpx.Client, accepted: str, encoding: str | None) -> None:
    response = client.get("/openapi.json", headers={"Accept-Encoding": accepted})
    assert response.headers.get("content-encoding") == encoding


def test_the_document_names_the_prefix_of_a_proxy() -> None:
    with serving(app(), root_path="/prefix") as client:
        assert [server["url"] for server in client.get("/openapi.json").json()["servers"]] == ["/prefix", "/"]


def headers_of(operation: dict[str, Any], status: int) -> dict[str, bool]:
    """The headers that the document names for a response, and whether each is always there."""
    named = component(operation["responses"][str(status)])["headers"]
    shared = {f"#/components/headers/{name}": header for name, header in DOCUMENT["components"]["headers"].items()}
    return {name: shared.get(header.get("$ref"), header).get("required", False) for name, header in named.items()}


def test_responses_have_the_headers_that_the_document_names() -> None:
    """Each that is required, and each that is sent beside those of HTTP itself and of security."""
    key = {"Authorization": "Bearer correct horse"}
    good = {"input": [[1.0]]}
    with serving(app(api_keys=HASH)) as protected:
        answers = [
            (OPERATIONS["computeAttention"], protected.post("/attention", json=good, headers=key)),
            (OPERATIONS["computeAttention"], protected.post("/attention", json=good)),
            (OPERATIONS["computeAttention"], protected.post("/attention", json={}, headers=key)),
            (OPERATIONS["listLayers"], protected.get("/layers")),
            (OPERATIONS["listLayers"], protected.get("/layers", headers=key)),
            (OPERATIONS["drawAttention"], protected.post("/attention/heatmap", json=good, headers=key)),
            (OPERATIONS["checkLive"], protected.get("/health/live")),
            (OPERATIONS["describeProblem"], protected.get("/problems/no")),
        ]
    stopped = app()
    stopped.state.engine.stopping = True
    with serving(stopped) as refusing:
        answers.append((OPERATIONS["checkReady"], refusing.get("/health/ready")))
    assert {response.status_code for _, response in answers} == {200, 401, 404, 422, 503}
    for operation, response in answers:
        named = headers_of(operation, response.status_code)
        sent = {name.title().replace("Id", "ID").replace("Www-", "WWW-") for name in response.headers}
        assert {name for name, required in named.items() if required} <= sent
        assert sent & DOCUMENT["components"]["headers"].keys() == named.keys(), operation["operationId"]


def test_operation_ids_are_stable() -> None:
    """Generated clients name their methods after the operation ids."""
    own = {"compareAttention", "computeAttention", "drawAttention", "mergeAttention", "compareCall", "computeCall"}
    server = {"checkLive", "checkReady", "getServerMetadata", "checkServerLive", "checkServerReady"}
    model = {"getModelMetadata", "getModelVersionMetadata", "checkModelReady", "checkModelVersionReady"}
    others = {"infer", "inferVersion", "listLayers", "getLayer", "describeProblem", "getMetrics"}
    assert set(OPERATIONS) == own | server | model | others


def test_every_field_is_described() -> None:
    missing = [
        f"{name}.{field}"
        for name, schema in DOCUMENT["components"]["schemas"].items()
        for field, content in schema.get("properties", {}).items()
        if "description" not in content and "$ref" not in content
    ]
    results = fields("AttentionResponse")
    assert [name for name in missing if name.partition(".")[0] not in ("ActualArrays", "AttentionResponse")] == []
    # ActualArrays names results, and AttentionResponse says of grad_x that it is the gradient of x.
    assert fields("ActualArrays").keys() < results.keys()
    undescribed = [name.partition(".")[2] for name in missing if name.startswith("AttentionResponse.")]
    assert all(name.startswith("grad_") for name in undescribed)


def test_every_field_of_a_request_is_described_in_one_sentence() -> None:
    """docs/attention.md has the others: there, the description of each field begins with this sentence."""
    page = " ".join((ROOT / "docs" / "attention.md").read_text(encoding="utf-8").replace("`", "").split())
    for name, field in fields("AttentionRequest").items():
        sentence = field["description"].partition(" Default: ")[0]
        assert (". " in sentence, len(sentence) <= 80) == (False, True), name
        assert f"| {name} | {sentence}".replace("`", "").replace("|", r"\|", 0) in page.replace(r"\|", "|"), name


def test_the_fields_that_most_people_use_come_first() -> None:
    first = ["query", "key", "value", "input", "is_causal", "mask", "scale", "layout", "include", "dtype"]
    assert list(fields("AttentionRequest"))[:10] == first


def test_a_request_that_extends_another_has_all_of_its_fields() -> None:
    shared = fields("AttentionRequest").items()
    assert fields("CompareRequest").items() > shared
    assert fields("HeatmapRequest").items() > shared


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if "requestBody" in OPERATIONS[name]])
def test_a_body_with_an_unknown_field_does_not_follow_its_schema(operation: str) -> None:
    content = OPERATIONS[operation]["requestBody"]["content"]["application/json"]
    for example in content["examples"].values():
        jsonschema.validate(example["value"], resolved(content["schema"]))
        if not operation.startswith("infer"):  # the protocol leaves that open
            with pytest.raises(jsonschema.ValidationError, match="unknown"):
                jsonschema.validate(example["value"] | {"unknown": 1}, resolved(content["schema"]))


def test_the_document_is_small(client: httpx.Client) -> None:
    """For agents, which read all of what they use: in kB as served, and of an operation beyond what others share."""
    assert len(client.get("/openapi.json").content) <= 110_000
    assert size(OPERATIONS["computeAttention"]) <= 30_000
    for name, operation in OPERATIONS.items():
        others = set().union(*(components(other) for other in OPERATIONS.values() if other is not operation))
        assert size(operation, others) <= 12_000, name


def test_every_field_of_a_request_has_a_default() -> None:
    """The document says that a field without one is absent; docs/ have the word none."""
    models: list[type[BaseModel]] = [
        AttentionRequest,
        InferenceRequest,
        InferenceInput,
        InferenceRequestedOutput,
        *Part.__subclasses__(),
    ]
    missing = [
        f"{model.__name__}.{name}"
        for model in models
        for name, field in model.model_fields.items()
        if not field.is_required()
        and field.default is None
        and "Default: " not in " ".join(str(field.description).split())
    ]
    assert missing == []
    assert "default" in DOCUMENT["info"]["description"]


def test_every_schema_is_used() -> None:
    names = set(DOCUMENT["components"]["schemas"])
    assert set(re.findall(r"#/components/schemas/(\w+)", json.dumps(DOCUMENT))) == names


def test_every_status_is_described() -> None:
    """The statuses of the table of bad requests, and those that are possible for any request."""
    documented = set(OPERATIONS["computeAttention"]["responses"])
    assert {str(bad.status) for bad in BAD} <= documented
    everywhere = {"404", "405"}
    assert {str(kind.status) for kind in error_classes().values()} - everywhere <= documented


def test_every_wire_format_is_described() -> None:
    operation = OPERATIONS["computeAttention"]
    assert set(operation["requestBody"]["content"]) == set(operation["responses"]["200"]["content"]) == set(CODECS)


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    return schema | {"components": DOCUMENT["components"]}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_real_requests_and_responses_follow_their_schemas(case: Any, client: httpx.Client) -> None:
    operation = OPERATIONS["computeAttention"]
    jsonschema.validate(case.request, resolved(operation["requestBody"]["content"]["application/json"]["schema"]))
    response = client.post("/attention", json=case.request)
    assert response.status_code == 200
    answer_schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(response.json(), resolved(answer_schema))


def test_real_problems_follow_their_schema(client: httpx.Client) -> None:
    for request in ({}, {"query": [[1]], "key": [[1, 2], [3]], "num_head": 3}):
        response = client.post("/attention", json=request)
        assert response.status_code == 422
        content = component(OPERATIONS["computeAttention"]["responses"]["422"])["content"]["application/problem+json"]
        jsonschema.validate(response.json(), resolved(content["schema"]))


EXAMPLES = OPERATIONS["computeAttention"]["requestBody"]["content"]["application/json"]["examples"]


def test_the_inference_example_runs(client: httpx.Client) -> None:
    """The first query attends to the first key; the second to both, and to its own key more."""
    operation = OPERATIONS["infer"]
    (example,) = operation["requestBody"]["content"]["application/json"]["examples"].values()
    jsonschema.validate(example["value"], resolved(operation["requestBody"]["content"]["application/json"]["schema"]))
    answer = client.post("/v2/models/attention/infer", json=example["value"]).json()
    jsonschema.validate(answer, resolved(operation["responses"]["200"]["content"]["application/json"]["schema"]))
    weight = 1 / (1 + math.exp(-(2**-0.5)))
    assert answer["outputs"][0]["data"] == pytest.approx([1, 1 + weight], rel=1e-6)
    error = client.post("/v2/models/attention/infer", json={}).json()
    content = component(operation["responses"]["400"])["content"]["application/json"]
    jsonschema.validate(error, resolved(content["schema"]))


def test_the_first_example_is_query_key_and_value(client: httpx.Client) -> None:
    """Four numbers in each array; by hand: the scores are 1/√2 and 0."""
    request = next(iter(EXAMPLES.values()))["value"]
    assert {name: np.shape(array) for name, array in request.items()} == dict.fromkeys(
        ("query", "key", "value"), (2, 2)
    )
    answer = client.post("/attention", json=request).json()
    more = math.exp(2**-0.5) / (math.exp(2**-0.5) + 1)
    np.testing.assert_allclose(answer["attention_weights"], [[more, 1 - more], [1 - more, more]], rtol=1e-12)
    expected = [[3 - 2 * more, 4 - 2 * more], [1 + 2 * more, 2 + 2 * more]]
    np.testing.assert_allclose(answer["output"], expected, rtol=1e-12)


@pytest.mark.parametrize("path", [path for path in DOCUMENT["paths"] if path.startswith("/attention")])
def test_examples_of_every_operation_run_and_follow_their_schemas(path: str, client: httpx.Client) -> None:
    operation = DOCUMENT["paths"][path]["post"]
    body = operation["requestBody"]["content"]["application/json"]
    answer = operation["responses"]["200"]["content"].get("application/json")
    for example in body["examples"].values():
        jsonschema.validate(example["value"], resolved(body["schema"]))
        response = client.post(path, json=example["value"])
        assert response.status_code == 200, response.text
        if answer is not None:
            jsonschema.validate(response.json(), resolved(answer["schema"]))


def test_the_response_example_is_that_of_the_first_request_example(client: httpx.Client) -> None:
    shown = OPERATIONS["computeAttention"]["responses"]["200"]["content"]["application/json"]["example"]
    answer = client.post("/attention", json=next(iter(EXAMPLES.values()))["value"]).json()
    assert shown.keys() == answer.keys()
    for name in ("output", "attention_weights"):
        np.testing.assert_allclose(shown[name], answer[name], rtol=0, atol=5.01e-9)
    assert shown["metadata"] == answer["metadata"] | {"request_id": shown["metadata"]["request_id"]}


def test_the_documentation_page_needs_no_internet(client: httpx.Client) -> None:
    page = client.get("/docs")
    assert page.status_code == 200
    assets = re.findall(r"""(?:src|href)=["']([^"']+)["']""", page.text)
    assert len(assets) >= 3
    for asset in assets:
        assert not re.match(r"(https?:)?//", asset), f"{asset} is fetched from elsewhere"
        response = client.get(urljoin("/docs", asset))
        assert response.status_code == 200
        assert len(response.content) > 500
    assert "/openapi.json" in page.text
    assert re.search(r'"validatorUrl": null', page.text)
