"""The plug-in computes what eager attention computes, for tiny models with random weights, and refuses all else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from transformers import GenerationConfig
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as of_gemma
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as of_gpt_oss
from transformers.models.inkling.modeling_inkling import eager_attention_forward as of_inkling
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer

import attention_service.transformers
from attention_service.codecs.array_objects import as_numpy
from attention_service.codecs.safetensors import request_bytes
from attention_service.transformers import ServiceFailed, UnsupportedCall, engine, interface, use
from attention_service.transformers.call import GENERATION, HARMLESS
from tests.conftest import app, serving
from tests.helpers.raw import connect
from tests.helpers.waiting import until
from tests.peers.architectures import (
    BLOCKS,
    COMMON,
    ENCODERS,
    OTHERS,
    OWN_ATTENTION,
    OWN_NAMES,
    PICTURES,
    SEQ2SEQ,
    tiny_model,
)

pytestmark = pytest.mark.filterwarnings("ignore")
NAME = attention_service.transformers.NAME
TOLERANCE = 2e-5
TOKENS = torch.tensor([[5, 9, 3, 7, 11, 4, 8, 6, 10, 12], [7, 3, 9, 14, 5, 6, 13, 8, 4, 3]])
LENGTH = TOKENS.shape[1]
CACHED = 7
# Those whose requests over HTTP differ most, of which every run tries all; the others are slow.
OVER_HTTP = ("llama", "qwen3", "gpt_oss", "gemma2", "deepseek_v32", "bert", "t5", "vit")


def padding(side: str) -> torch.Tensor:
    """The attention mask of a batch whose first sequence has three tokens of padding."""
    mask = torch.ones_like(TOKENS)
    mask[0, :3] = side != "left"
    mask[0, -3:] = side != "right"
    return mask


def logits(model: Any, architecture: str, scenario: str) -> torch.Tensor:
    """What the model computes of tokens that are no padding, or of a picture."""
    if architecture in PICTURES:
        pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        return as_tensor(model(pixel_values=pixels).last_hidden_state)
    if scenario == "cached":
        return decoded(model)
    mask = padding(scenario)
    if architecture in SEQ2SEQ:
        return as_tensor(model(input_ids=TOKENS, attention_mask=mask, decoder_input_ids=TOKENS[:, :6]).logits)
    return as_tensor(model(input_ids=TOKENS, attention_mask=mask).logits[mask.bool()])


def as_tensor(found: Any) -> torch.Tensor:
    assert isinstance(found, torch.Tensor)
    return found


def decoded(model: Any) -> torch.Tensor:
    """The logits of three tokens, one after the other, behind those in the cache."""
    cache = model(input_ids=TOKENS[:, :CACHED], use_cache=True).past_key_values
    steps = []
    for position in range(CACHED, LENGTH):
        answer = model(input_ids=TOKENS[:, position : position + 1], past_key_values=cache, use_cache=True)
        cache = answer.past_key_values
        steps.append(answer.logits)
    return torch.cat(steps, dim=1)


def scenarios(architecture: str) -> tuple[str, ...]:
    """What is computed of an architecture."""
    if architecture in PICTURES:
        return ("pictures",)
    padded = ("none", "left", "right")
    return padded if architecture in (*ENCODERS, *SEQ2SEQ) else (*padded, "cached")


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, *, wrong: bool = False) -> Iterator[list[int]]:
    """How many layers the plug-in computes. wrong: with another query's output"""
    calls: list[int] = []
    compute = interface.compute

    def counting(fields: Any) -> Any:
        calls.append(1)
        found = compute(fields)
        return found | {"output": found["output"][:, :, ::-1].copy()} if wrong else found

    with monkeypatch.context() as patched:
        patched.setattr(interface, "compute", counting)
        yield calls


def deviation(one: torch.Tensor, other: torch.Tensor) -> float:
    assert one.shape == other.shape
    assert one.isfinite().all()
    return float((one - other).abs().max() / max(1, one.abs().max()))


def agree(architecture: str, monkeypatch: pytest.MonkeyPatch, **sizes: Any) -> float:
    """The largest deviation from eager attention; asserts that a wrong attention would deviate more.

    sizes: of the model, beside those of every architecture
    """
    model = tiny_model(architecture, **sizes)
    worst = 0.0
    for scenario in scenarios(architecture):
        with torch.no_grad():
            model.set_attn_implementation("eager")
            expected = logits(model, architecture, scenario)
            model.set_attn_implementation(NAME)
            with counted(monkeypatch) as calls:
                found = logits(model, architecture, scenario)
            assert calls, f"{architecture}, {scenario}: the plug-in computed no layer"
            worst = max(worst, deviation(expected, found))
            if scenario in ("none", "pictures"):
                with counted(monkeypatch, wrong=True):
                    other = logits(model, architecture, scenario)
                assert deviation(expected, other) > 100 * TOLERANCE, f"{architecture}: attention does not matter"
        assert worst <= TOLERANCE, f"{architecture}, {scenario}: {worst:.1e}"
    return worst


@pytest.mark.parametrize("architecture", [*COMMON, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_an_architecture_computes_what_eager_attention_computes(
    architecture: str, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    """Without padding, with padding on either side, and with cached tokens."""
    record_property("architecture", f"{architecture:24} supported, deviation {agree(architecture, monkeypatch):.1e}")


# Those whose modules keep `output_attentions` from their attention function; the last two hand it on.
SILENT = ("gpt2", "gpt_bigcode", "nemotron", "opt", "persimmon", "siglip_vision_model", "stablelm", "llama", "t5")


def inputs_of(architecture: str) -> dict[str, Any]:
    """What a model is asked for its attentions."""
    random = torch.Generator().manual_seed(1)
    if architecture in PICTURES:
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=random)}
    if architecture == "moonshine":
        return {"input_values": torch.randn(2, 4000, generator=random), "decoder_input_ids": TOKENS[:, :6]}
    return {"input_ids": TOKENS} | ({"decoder_input_ids": TOKENS[:, :6]} if architecture in SEQ2SEQ else {})


@pytest.mark.parametrize(
    "architecture",
    [
        *SILENT,
        "moonshine",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (*COMMON, *OTHERS)
            if name not in (*SILENT, "granite_swa", "granitemoe_swa")
        ),
    ],
)
def test_a_model_returns_the_weights_that_eager_attention_returns(architecture: str) -> None:
    """Of each layer, also where a module keeps `output_attentions` from its attention function."""
    model = tiny_model(architecture)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(**inputs_of(architecture), output_attentions=True)
        model.set_attn_implementation(NAME)
        found = model(**inputs_of(architecture), output_attentions=True)
        assert not flat(model(**inputs_of(architecture)).get("attentions"))
    names = [name for name in expected if name.endswith("attentions")]
    assert any(flat(expected[name]) for name in names)
    for name in names:
        for one, other in zip(flat(expected[name]), flat(found[name]), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def flat(attentions: Any) -> list[torch.Tensor]:
    """The weights of all layers, some of which nest several and some of which have none."""
    if isinstance(attentions, torch.Tensor):
        return [attentions]
    several = attentions.values() if isinstance(attentions, dict) else attentions or ()
    return [weights for each in several for weights in flat(each)]


@pytest.mark.parametrize(
    "architecture", ["deepseek_v32", "axk2", "glm_moe_dsa", "hy_v4", "minimax_m3_vl_text", "llama"]
)
def test_rows_of_padding_on_the_left_are_those_of_eager_attention(architecture: str) -> None:
    """Queries that see no key average all keys, also where an indexer chooses some."""
    model = tiny_model(architecture, **BLOCKS.get(architecture, {}))
    answers = []
    for implementation in ("eager", NAME):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            answers.append(model(input_ids=TOKENS, attention_mask=padding("left")).logits)
    assert deviation(*answers) <= TOLERANCE


@pytest.fixture(autouse=True)
def _here_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test says by `use` ends with it."""
    monkeypatch.setattr(engine, "_place", None)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(app()) as client:
        yield str(client.base_url)


@pytest.mark.parametrize(
    "architecture",
    [
        *OVER_HTTP,
        *(pytest.param(name, marks=pytest.mark.slow) for name in (*COMMON, *OTHERS) if name not in OVER_HTTP),
    ],
)
def test_an_architecture_computes_the_same_over_http(
    architecture: str, url: str, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    """As in this process: without padding, with padding on either side, and with cached tokens."""
    use(url)
    record_property("architecture", f"{architecture:24} over HTTP, deviation {agree(architecture, monkeypatch):.1e}")


@pytest.mark.parametrize("architecture", BLOCKS)
@pytest.mark.parametrize("over_http", [False, True])
def test_an_architecture_attends_to_chosen_blocks_of_keys(
    architecture: str, over_http: bool, url: str, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    use(url if over_http else None)
    found = agree(architecture, monkeypatch, **BLOCKS[architecture])
    with monkeypatch.context() as patched:  # all blocks are something else
        patched.setattr(MiniMaxM3VLIndexer, "build_block_mask", lambda _indexer, _blocks, mask, *_: mask)
        model = tiny_model(architecture, NAME, **BLOCKS[architecture])
        with torch.no_grad():
            every = logits(model, architecture, "none")
    with torch.no_grad():
        assert deviation(logits(model, architecture, "none"), every) > 100 * TOLERANCE
    where = "over HTTP, " if over_http else ""
    record_property("architecture", f"{architecture:24} with blocks of keys, {where}deviation {found:.1e}")


@pytest.mark.parametrize("architecture", [pytest.param(name, marks=pytest.mark.slow) for name in OWN_ATTENTION])
def test_an_architecture_with_attention_of_its_own_keeps_it(
    architecture: str, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    """transformers has no hook there; the model then computes what it always did."""
    model = tiny_model(architecture, NAME)
    with torch.no_grad(), counted(monkeypatch) as calls:
        model(input_ids=TOKENS)
    assert not calls
    record_property("architecture", f"{architecture:24} attention of its own")


@pytest.mark.parametrize("architecture", OWN_NAMES)
def test_an_architecture_with_names_of_its_own_refuses_that_of_the_plug_in(
    architecture: str, record_property: Any
) -> None:
    with pytest.raises(KeyError, match=NAME):
        tiny_model(architecture, NAME)
    record_property("architecture", f"{architecture:24} refused: it knows the names of its own attention only")


# One call: four query heads, two of key and value, three queries, five keys.
SHAPES = (2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 6)


class Layer(torch.nn.Module):
    """A module that calls its attention."""

    num_key_value_groups = 2


def call(**arguments: Any) -> Any:
    """The plug-in's answer to a call of random numbers."""
    random = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(shape, generator=random) for shape in SHAPES)
    sources = {"query": query, "key": key, "value": value, "attention_mask": None}
    return interface.attention(Layer(), **sources | arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"cache": object()},
        {"cu_seq_lens_q": torch.tensor([0, 3])},
        {"block_indices": torch.zeros(1)},
        {"alibi_slopes": torch.zeros(4)},
        {"made_up": 0},
        {"temperature": 0.5},  # of generation, or of a layer's softmax
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_an_argument_that_could_change_the_result_is_refused_by_its_name(arguments: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedCall, match=next(iter(arguments))):
        call(**arguments)
    call(**dict.fromkeys(arguments))  # None is no argument


@pytest.mark.parametrize("name", sorted({*HARMLESS, *GENERATION}))
def test_a_harmless_argument_changes_nothing(name: str) -> None:
    assert name in GENERATION or HARMLESS[name]
    torch.testing.assert_close(call(**{name: torch.zeros(1)})[0], call()[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"s_aux": torch.zeros(3)}, "s_aux"),
        ({"sinks": torch.zeros(4)}, "sinks"),
        ({"scaling": torch.ones(4)}, "scaling"),
        ({"attention_mask": torch.ones(3, 5, dtype=torch.int64)}, "attention_mask"),
        ({"attention_mask": torch.ones(1, 1, 1, 3, 5)}, "mask"),
        ({"query": torch.zeros(4, 3, 8)}, "ranks"),
        ({"key": torch.zeros(2, 3, 5, 8)}, "num_key_value_groups"),
        ({"is_causal": True}, "is_causal"),
        ({"sliding_window": 2}, "sliding_window"),
    ],
)
def test_what_has_no_field_is_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedCall, match=named):
        call(**arguments)


def test_arguments_of_generation_are_those_of_transformers() -> None:
    assert vars(GenerationConfig()).keys() >= GENERATION


def test_a_mask_and_chosen_keys_hide_together() -> None:
    """As eager attention of DeepSeek V3.2 does it: a mask with the least number where a key is not chosen."""
    added = torch.zeros(2, 1, 3, 5)
    added[:, :, 0] = torch.finfo(torch.float32).min  # a query that sees no key, whatever is chosen
    indices = torch.tensor([[[0, 2], [4, -1], [1, 1]]], dtype=torch.int32).expand(2, -1, -1)
    both = added.clone()
    for query, keys in enumerate(({0, 2}, {4}, {1})):
        both[:, :, query, sorted(set(range(5)) - keys)] = torch.finfo(torch.float32).min
    found = call(attention_mask=added, indices=indices, output_attentions=True)
    for one, other in zip(found, call(attention_mask=both, output_attentions=True), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    torch.testing.assert_close(found[1][:, :, 0], torch.full((2, 4, 5), 0.2))


def test_a_traced_model_is_refused() -> None:
    with pytest.raises(UnsupportedCall, match="traced"):
        torch.jit.trace(lambda query: call(query=query)[0], torch.zeros(SHAPES[0]))


def test_every_option_of_a_call_counts() -> None:
    """Against eager functions of transformers, with a random mask that leaves each query a key."""
    random = torch.Generator().manual_seed(3)
    seen = torch.rand((2, 1, 3, 5), generator=random) < 0.6
    seen[..., 0] = True
    bias, layer = torch.randn((1, 4, 3, 5), generator=random), Layer()
    layer.sinks = torch.nn.Parameter(torch.randn(4, generator=random))
    query, key, value = (torch.randn(shape, generator=random) for shape in SHAPES)
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        for forward, options, theirs in (
            (of_gemma, {"softcap": 0.7, "scaling": 0.3}, {}),
            (of_gpt_oss, {"scaling": 0.5}, {"s_aux": layer.sinks}),
            (of_inkling, {"scaling": 0.4, "position_bias": bias}, {}),
        ):
            expected = forward(layer, query, key, value, added, **options)
            for mask in (seen, added):
                arguments = {"attention_mask": mask, "output_attentions": True}
                found = interface.attention(layer, query, key, value, **arguments, **options, **theirs)
                for one, other in zip(found, expected, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_only_chosen_keys_are_visible() -> None:
    indices = torch.tensor([[[0, 2], [4, -1], [1, 1]]], dtype=torch.int32).expand(2, -1, -1)
    weights = call(indices=indices, output_attentions=True)[1]
    expected = torch.zeros(3, 5, dtype=torch.bool)
    expected[0, [0, 2]] = expected[1, 4] = expected[2, 1] = True
    assert ((weights > 0) == expected).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_output_has_the_type_of_the_query(dtype: torch.dtype, url: str) -> None:
    sources = {
        name: torch.ones(shape, dtype=dtype) for name, shape in zip(("query", "key", "value"), SHAPES, strict=True)
    }
    here = call(**sources)[0]
    assert (here.dtype, tuple(here.shape), here.is_contiguous()) == (dtype, (2, 3, 4, 6), True)
    torch.testing.assert_close(here, torch.ones_like(here))
    use(url)
    torch.testing.assert_close(call(**sources)[0], here, rtol=0, atol=0)


def test_one_batch_entry_stands_for_all() -> None:
    query = torch.randn(SHAPES[0])[:1]
    torch.testing.assert_close(call(query=query)[0], call(query=query.expand(2, -1, -1, -1))[0], rtol=0, atol=0)


def test_a_service_over_http_gets_the_key_and_its_errors_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "a-key-of-at-least-thirty-two-characters"
    with serving(app(api_keys=f"sha256:{hashlib.sha256(key.encode()).hexdigest()}")) as client:
        monkeypatch.setenv("ATTENTION_SERVICE_URL", str(client.base_url))
        with pytest.raises(ServiceFailed, match="401"):
            call()
        monkeypatch.setenv("ATTENTION_SERVICE_KEY", key)
        assert call()[0].shape == (2, 3, 4, 6)
        with pytest.raises(ServiceFailed, match=r"422.*overflow"):
            call(scaling=float("1e39"))
    with pytest.raises(ServiceFailed, match="ConnectError"):
        call()


@contextmanager
def at_its_limit() -> Iterator[tuple[httpx.Client, Callable[[], None]]]:
    """A server whose only slot is taken by a long request, and a function that disconnects the client of that."""
    service_app = app(concurrency=1, queue=0, inline_flops=1)
    admission = service_app.state.engine.admission
    long = dict.fromkeys(("query", "key", "value"), torch.zeros(1, 1, 60_000, 8))
    body = request_bytes(as_numpy(long | {"layout": "bhld", "include": []}))
    head = b"POST /attention HTTP/1.1\r\nHost: x\r\nContent-Type: application/vnd.safetensors\r\n"
    with serving(service_app) as client, connect(client) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: admission.slots_taken == 1)

        def disconnect() -> None:
            connection.close()
            until(lambda: admission.slots_taken == 0)

        try:
            yield client, disconnect
        finally:
            disconnect()


def test_a_busy_service_is_asked_again_when_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, waited = call()[0], []
    with at_its_limit() as (client, disconnect):

        def sleep(seconds: float) -> None:
            waited.append(seconds)
            if len(waited) == 2:
                disconnect()

        monkeypatch.setattr(engine, "time", SimpleNamespace(sleep=sleep))
        use(str(client.base_url))
        torch.testing.assert_close(call()[0], expected, rtol=0, atol=0)
    assert len(waited) == 2
    assert all(1 <= seconds <= engine.MOST_SECONDS for seconds in waited)


def test_a_service_that_stays_busy_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    with at_its_limit() as (client, _):
        monkeypatch.setattr(engine, "time", SimpleNamespace(sleep=waited.append))
        use(str(client.base_url))
        with pytest.raises(ServiceFailed, match=f"busy, after {engine.TRIES} tries.*503.*1 slots in use"):
            call()
        assert client.get("/health/live").status_code == 200
    assert len(waited) == engine.TRIES - 1


@pytest.mark.parametrize(
    ("header", "seconds"), [("3", 3), ("9999", 10), ("", 1), ("Wed, 21 Oct 2026 07:28:00 GMT", 1), ("-5", 1)]
)
def test_what_a_busy_service_may_say(header: str, seconds: float) -> None:
    assert engine._seconds(header) == seconds
