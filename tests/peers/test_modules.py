"""One request gives what a whole attention module of transformers gives, for tiny models with random weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING

from attention_service import attend
from tests.conftest import app, serving
from tests.peers.architectures import COMMON, model_class, tiny_model
from tests.peers.module_forms import Call, Fields, called, found
from tests.peers.modules import ENCODERS, OTHERS, PICTURES, ROWS, SEQ2SEQ, UNCACHED, WHOLE, Row
from tests.peers.speech import LISTENERS, listen, listener
from tests.peers.test_transformers import CACHED, LENGTH, TOKENS, padding

pytestmark = pytest.mark.filterwarnings("ignore")
TOLERANCE = 1e-5
# What a request has beside the options of the table.
PLAIN = {"input", "context", "query", "key", "value", "num_heads", "num_kv_heads", "key_mask", "key_lengths",
         "segment_ids", "past_key", "past_value", "query_offset"}  # fmt: skip
NESTED = ("kind", "over", "position", "interleaved", "query_positions", "first", "query_bias")
# With an option each that others have not.
ELSEWHERE = ("llama", "qwen3_next", "gemma3n_text", "llama4_text", "granite_swa", "deepseek_v3", "bert", "t5", "bitnet",
             "wav2vec2-conformer", "gemma3n_audio")  # fmt: skip
MARKED = [name if name in COMMON else pytest.param(name, marks=pytest.mark.slow) for name in ROWS]


def model_of(architecture: str, more: Any) -> Any:
    """A tiny model; its norms and biases are random, too."""
    more = copy.deepcopy(more)  # configurations change what they are made of
    if architecture in LISTENERS:
        model = listener(architecture, more)
    elif architecture in WHOLE:
        config = CONFIG_MAPPING[architecture](**more)
        model = model_class(architecture)._from_config(config, attn_implementation="eager").eval().float()
    else:
        model = tiny_model(architecture, **more)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if parameter.ndim < 2 or "q_norm" in name or "k_norm" in name:
                parameter += 0.3 * noise
            elif architecture in (*WHOLE, *LISTENERS):
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return model


def scenarios(architecture: str) -> tuple[str, ...]:
    """What a model computes."""
    if architecture in PICTURES:
        return ("pictures",)
    if architecture in LISTENERS:
        return ("none", "right") if LISTENERS[architecture].padded else ("none",)
    padded = ("none", "left", "right")
    return padded if architecture in (*ENCODERS, *SEQ2SEQ, *UNCACHED) else (*padded, "cached")


def run(model: Any, architecture: str, scenario: str) -> None:
    """Let a model compute the tokens of a scenario, or a picture."""
    if architecture in PICTURES:
        model(pixel_values=torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)))
    elif architecture in LISTENERS:
        listen(model, architecture, TOKENS, padding(scenario))
    elif scenario == "cached":
        cache = model(input_ids=TOKENS[:, :CACHED], use_cache=True).past_key_values
        for token in TOKENS[:, CACHED:].split(1, dim=1):
            cache = model(input_ids=token, past_key_values=cache, use_cache=True).past_key_values
    else:
        more = {"decoder_input_ids": TOKENS[:, :6]} if architecture in SEQ2SEQ else {}
        model(input_ids=TOKENS, attention_mask=padding(scenario), **more)


class Recorder:
    """Hooks that keep the calls of each attention module of a model, by its name, in their order."""

    def __init__(self, model: Any, row: Row) -> None:
        self.calls: dict[str, list[Call]] = {}
        self._arguments: dict[str, dict[str, Any]] = {}
        self._last, self._tokens_first = row.last, row.tokens_first
        self._hooks = []
        for name, module in model.named_modules():
            if type(module).__name__ not in row.module.split():
                continue
            first, last = (module.get_submodule(part) for part in (row.entry, row.part))
            self._hooks.append(first.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
            for part in row.inside:
                hook = partial(self._keep, name, part)
                self._hooks.append(module.get_submodule(part).register_forward_hook(hook))
            self._hooks.append(last.register_forward_hook(partial(self._leave, name, module)))

    def _enter(self, name: str, module: Any, given: Any, named: Any) -> None:
        arguments = called(module, given, named)
        if getattr(module, "is_kv_shared_layer", False):
            arguments["shared"] = arguments["shared_kv_states"][module.layer_type]
        past = sum(call.length for call in self.calls.get(name, []))
        self._arguments[name] = arguments | {"inside": {}, "past": past}

    def _keep(self, name: str, part: str, module: Any, given: Any, output: Any) -> None:
        self._arguments[name]["inside"][part] = output

    def _leave(self, name: str, module: Any, part: Any, given: Any, output: Any) -> None:
        arguments = self._arguments[name]
        hidden = next(arguments[key] for key in ("hidden_states", "query_tensor", "q", "h") if key in arguments)
        output = arguments["inside"].get(self._last, output)
        left = output[0] if isinstance(output, tuple) else output
        if self._tokens_first:
            hidden, left = hidden.transpose(0, 1), left.transpose(0, 1)
        self.calls.setdefault(name, []).append(Call(module, hidden.numpy(), arguments, left.numpy()))

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def recorded(model: Any, architecture: str, row: Row, scenario: str) -> dict[str, list[Call]]:
    """The calls of each attention module of a model in a scenario."""
    recorder = Recorder(model, row)
    with torch.no_grad():
        run(model, architecture, scenario)
    recorder.close()
    assert recorder.calls, f"{architecture} has no module {row.module}"
    return recorder.calls


def padded(fields: Fields, scenario: str) -> Fields:
    """A request that hides the padding of a scenario, if its keys are those of the padded batch."""
    keys = fields.get("context", fields.get("key", fields.get("input")))
    if scenario not in ("left", "right") or keys.shape[1] != LENGTH:
        return fields
    visible = padding(scenario).bool().numpy()
    if scenario == "right":
        return fields | {"key_lengths": visible.sum(axis=1)}
    if "chunk_size" not in fields:
        return fields | {"key_mask": visible}
    # transformers counts the chunks from the first token that is no padding
    chunks = (np.arange(LENGTH) - (~visible).sum(axis=1, keepdims=True)) // fields["chunk_size"]
    without = {name: value for name, value in fields.items() if name != "chunk_size"}
    return without | {"key_mask": visible, "segment_ids": {"query": chunks, "key": chunks}}


def deviation(call: Call, output: Any, scenario: str) -> float:
    """The largest difference of an output from the module's, where tokens are no padding, by the largest number."""
    seen = np.ones(call.output.shape[:2], bool)
    if scenario in ("left", "right") and call.length == LENGTH:
        seen = padding(scenario).bool().numpy()
    assert np.shape(output) == call.output.shape
    expected, found = call.output[seen], np.asarray(output)[seen]
    assert np.isfinite(found).all()
    assert np.abs(expected).max() > 0.05
    return float(np.abs(found - expected).max() / max(1.0, np.abs(expected).max()))


def head_dim(fields: Fields) -> int:
    """The features of a head of queries, by their map; 1 where there is none."""
    linear = fields["projection"].get("query", {})
    if "kernel" in linear:
        return int(linear["kernel"].shape[1] // fields["num_heads"])
    if "weight" not in linear:
        return 1
    weight = linear["weight"]
    return int(weight.shape[1] if weight.ndim == 3 else len(weight) // fields["num_heads"])


def used(fields: Fields) -> set[str]:
    """The options of a request, nested ones by dotted names where they are not the default."""
    names = set(fields) - PLAIN - {"projection"}
    if "scale" in fields and np.isclose(fields["scale"], head_dim(fields) ** -0.5):
        names.remove("scale")  # as by default
    if "gate" in fields["projection"]:
        names.add("projection.gate")
    for name in ("query_norm", "key_norm", "value_norm", "output_norm", "rotary", "relative_keys"):
        nested = fields.get(name, {})
        names |= {f"{name}.{part}" for part in NESTED if nested.get(part) is not None and nested[part] is not False}
    return names


def agree(row: Row, calls: list[Call], scenario: str, **more: Any) -> tuple[float, set[str]]:
    """The largest deviation of the calls of one module, each one request, and the options of these requests.

    The past of a request is what the request before it returned.
    """
    worst, options, past = 0.0, set[str](), dict[str, Any]()
    for call in calls:
        fields = padded(row.form(call), scenario)
        chained = scenario == "cached" and "shared" not in call.arguments
        result = attend(**fields, **past, include=("present_key", "present_value") if chained else (), **more)
        if chained:
            past = {"past_key": result["present_key"], "past_value": result["present_value"]}
        worst = max(worst, deviation(call, result.output, scenario))
        options |= used(fields)
    return worst, options


def assert_each_option_matters(row: Row, modules: dict[str, list[Call]], options: set[str]) -> None:
    """A request without one of its options gives another output, in at least one module."""
    requests = [(call, row.form(call)) for calls in modules.values() for call in calls[:1]]
    for option in sorted(name for name in options if "." not in name):
        worst = 0.0
        for call, fields in requests:
            if option in fields:
                without = {name: value for name, value in fields.items() if name != option}
                worst = max(worst, deviation(call, attend(**without, include=()).output, "none"))
        assert worst > 10 * TOLERANCE, f"{option} changes nothing"


@pytest.mark.parametrize("architecture", MARKED)
def test_one_request_is_a_whole_attention_module(architecture: str, record_property: Any) -> None:
    row = ROWS[architecture]
    model = model_of(architecture, row.more)
    worst, options = 0.0, set[str]()
    for scenario in scenarios(architecture):
        modules = recorded(model, architecture, row, scenario)
        here = set[str]()
        for name, calls in modules.items():
            found, names = agree(row, calls, scenario)
            assert found <= TOLERANCE, f"{scenario}, {name}: {found:.1e}"
            worst, here = max(worst, found), here | names
        if scenario in ("none", "pictures"):
            assert_each_option_matters(row, modules, here)
        options |= here
    record_property("architecture", f"{architecture:24} one request, deviation {worst:.1e}")
    assert " ".join(sorted(options)) == row.fields, "the table in modules.py says otherwise"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(app()) as found:
        yield found


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("architecture", ELSEWHERE)
def test_a_whole_module_over_http_and_with_torch(architecture: str, client: httpx.Client) -> None:
    row = ROWS[architecture]
    model = model_of(architecture, row.more)
    scenario = "right"
    for name, calls in recorded(model, architecture, row, scenario).items():
        assert agree(row, calls, scenario, backend="torch")[0] <= TOLERANCE, name
        fields = plain(padded(row.form(calls[0]), scenario))
        answer = client.post("/attention", json={**fields, "dtype": "float32", "include": []})
        assert answer.status_code == 200, answer.text
        output = np.array(answer.json()["output"], np.float32)
        assert deviation(calls[0], output, scenario) <= TOLERANCE, name


@pytest.mark.parametrize("architecture", [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS])
def test_what_keeps_a_module_from_one_request_is_there(architecture: str) -> None:
    other = OTHERS[architecture]
    modules = [each for each in model_of(architecture, other.more).modules() if type(each).__name__ == other.module]
    assert modules
    assert any(found(module, (other.part,)) is not None for module in modules)
