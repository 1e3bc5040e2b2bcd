"""Models that train through the plug-in: their gradients and losses are those of eager attention."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as of_gpt_oss

from attention_service.transformers import UnsupportedCall, attention, capture, engine, interface, use
from tests.conftest import app, serving
from tests.peers.architectures import COMMON, OTHERS, tiny_model
from tests.peers.test_capture import PACKAGE, SENTENCE
from tests.peers.test_transformers import NAME, TOKENS, Layer, logits, padding, scenarios

pytestmark = pytest.mark.filterwarnings("ignore")
# Of the largest gradient of a parameter, and a hundredth of the largest gradient of all parameters: where the gradients
# of a parameter cancel, as those of key biases do, only rounding is left.
TOLERANCE = 2e-5
FLOOR = 1e-2
STEPS = 20
# Sinks of heads and of queries, softcap, windows, latents, position biases, selected keys, cross-attention, pictures.
FIRST = ("llama", "gpt_oss", "gemma2", "deepseek_v32", "inkling2_text", "bert", "t5", "vit")

Step = Callable[[Any], torch.Tensor]


@pytest.fixture(autouse=True)
def _here_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test says by `use` ends with it."""
    monkeypatch.setattr(engine, "_place", None)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The requests of the plug-in, in their order."""
    sent: list[dict[str, Any]] = []
    compute = interface.compute

    def recording(fields: Any) -> Any:
        sent.append(dict(fields))
        return compute(fields)

    monkeypatch.setattr(interface, "compute", recording)
    return sent


def parameter_gradients(model: Any, step: Step) -> dict[str, torch.Tensor]:
    model.zero_grad()
    step(model).backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The gradients of all parameters agree but for rounding in float32."""
    assert found.keys() == expected.keys()
    largest = {name: float(gradient.abs().max()) for name, gradient in expected.items() if gradient.numel()}
    for name, size in largest.items():
        error = float((found[name] - expected[name]).abs().max())
        assert error <= TOLERANCE * (size + FLOOR * max(largest.values())), name


def check_gradients(architecture: str, requests: list[dict[str, Any]]) -> None:
    """With and without padding, of a loss to which each logit counts differently."""
    model = tiny_model(architecture)
    for scenario in scenarios(architecture):
        if scenario == "cached":
            continue

        def step(model: Any, scenario: str = scenario) -> torch.Tensor:
            found = logits(model, architecture, scenario)
            return (found * torch.randn(found.shape, generator=torch.Generator().manual_seed(5))).sum()

        model.set_attn_implementation("eager")
        expected = parameter_gradients(model, step)
        model.set_attn_implementation(NAME)
        requests.clear()
        found = parameter_gradients(model, step)
        assert any("grad_output" in request for request in requests)
        assert_close(found, expected)


@pytest.mark.parametrize(
    "architecture",
    [*FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in (*COMMON, *OTHERS) if name not in FIRST)],
)
def test_parameters_get_the_gradients_of_eager_attention(architecture: str, requests: list[dict[str, Any]]) -> None:
    check_gradients(architecture, requests)


@pytest.mark.parametrize("architecture", [pytest.param("gpt_oss", marks=pytest.mark.slow), "t5"])
def test_a_service_over_http_computes_gradients(architecture: str, requests: list[dict[str, Any]]) -> None:
    with serving(app()) as client:
        use(str(client.base_url))
        check_gradients(architecture, requests)


def losses(model: Any, implementation: str, optimizer: Callable[[Any], Any], step: Step) -> list[float]:
    """The loss of each step of training."""
    model.set_attn_implementation(implementation)
    model.train()
    optimizing, found = optimizer([each for each in model.parameters() if each.requires_grad]), []
    for _ in range(STEPS):
        optimizing.zero_grad()
        loss = step(model)
        loss.backward()
        optimizing.step()
        found.append(loss.item())
    return found


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)


def check_training(
    make: Callable[[], Any], optimizer: Callable[[Any], Any], step: Step, tolerance: float, other: str = "eager"
) -> None:
    expected, found = (losses(make(), implementation, optimizer, step) for implementation in (other, NAME))
    assert expected[-1] < 0.5 * expected[0], "the model learns nothing"
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("optimizer", [adamw, pytest.param(sgd, marks=pytest.mark.slow)])
@pytest.mark.parametrize("side", ["none", "left", pytest.param("right", marks=pytest.mark.slow)])
def test_a_llama_learns_as_by_eager_attention(optimizer: Any, side: str) -> None:
    """Two query heads read each head of key and value."""

    def step(model: Any) -> torch.Tensor:
        labels = TOKENS.masked_fill(padding(side) == 0, -100)
        return as_loss(model(input_ids=TOKENS, labels=labels, attention_mask=padding(side)).loss)

    check_training(lambda: tiny_model("llama"), optimizer, step, 1e-5)


def test_a_llama_in_float64_learns_as_by_torch() -> None:
    """By sdpa, as eager attention of transformers takes the softmax of float64 in float32."""

    def step(model: Any) -> torch.Tensor:
        return as_loss(model(input_ids=TOKENS, labels=TOKENS, attention_mask=padding("right")).loss)

    check_training(lambda: tiny_model("llama").double(), adamw, step, 1e-10, "sdpa")


def as_loss(found: Any) -> torch.Tensor:
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_a_trained_model_learns_as_by_eager_attention(dtype: torch.dtype, tolerance: float) -> None:
    """Two sentences, one of them padded, whose embeddings are to become random ones. Its words stay as they are."""
    pytest.importorskip(PACKAGE)
    folder = files(PACKAGE) / "model"
    inputs = AutoTokenizer.from_pretrained(folder)([SENTENCE, "It was tired"], return_tensors="pt", padding=True)
    goal = torch.randn(2, 384, generator=torch.Generator().manual_seed(0)).to(dtype)
    weights = inputs["attention_mask"] / inputs["attention_mask"].sum(1, keepdim=True)

    def make() -> Any:
        model = AutoModel.from_pretrained(folder, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0).to(dtype)
        model.embeddings.requires_grad_(False)
        return model

    def step(model: Any) -> torch.Tensor:
        hidden = model(**inputs).last_hidden_state
        return as_loss((torch.einsum("bl,bld->bd", weights.to(dtype), hidden) - goal).square().mean())

    check_training(make, sgd, step, tolerance)


def arrays(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Random arguments of a call that requires all of their gradients."""
    shapes = {
        "query": (2, 4, 2, 3), "key": (2, 2, 5, 3), "value": (2, 2, 5, 2), "attention_mask": (1, 1, 2, 5),
        "position_bias": (1, 4, 2, 5), "s_aux": (4,), "scaling": (),
    }  # fmt: skip
    random = torch.Generator().manual_seed(6)
    return {name: torch.randn(s, generator=random).to(dtype).requires_grad_() for name, s in shapes.items()}


def call(given: dict[str, Any], **more: Any) -> Any:
    return attention(Layer(), **given, **more)[0]


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_gradcheck_passes_with_every_argument_that_has_a_gradient(backend: str) -> None:
    use(backend=backend)
    given = arrays()
    assert torch.autograd.gradcheck(
        lambda *values: call(dict(zip(given, values, strict=True)), softcap=1.5), tuple(given.values())
    )


@pytest.mark.parametrize("wanted", arrays())
def test_only_the_gradients_that_are_needed_are_asked_for(wanted: str, requests: list[dict[str, Any]]) -> None:
    given = arrays()
    whole = torch.autograd.grad(call(given).sum(), list(given.values()))
    alone = {name: value.detach().requires_grad_(name == wanted) for name, value in given.items()}
    call(alone).sum().backward()
    fields = {"attention_mask": "bias", "position_bias": "bias", "s_aux": "sinks", "scaling": "scale"}
    assert requests[-1]["include"] == [f"grad_{fields.get(wanted, wanted)}"]
    expected = whole[list(given).index(wanted)]
    torch.testing.assert_close(alone[wanted].grad, expected, rtol=1e-13, atol=1e-13)


def test_sinks_of_queries_and_one_batch_entry_for_all_have_gradients() -> None:
    given = {name: value for name, value in arrays().items() if name in ("query", "key", "value")}
    given["query"] = given["query"][:1].detach().requires_grad_()
    given["sinks"] = torch.randn(2, 4, 2, 2, dtype=torch.float64).requires_grad_()
    names = tuple(given)
    assert torch.autograd.gradcheck(lambda *values: call(dict(zip(names, values, strict=True))), tuple(given.values()))


def test_a_learned_mask_that_hides_or_changes_nothing_has_a_gradient() -> None:
    """Booleans could say it, too, but have no gradient."""
    mask = torch.zeros(1, 1, 2, 5, dtype=torch.float64)
    mask[..., 4:] = -torch.inf
    mask.requires_grad_()
    given = arrays() | {"attention_mask": mask}
    expected, found = (
        torch.autograd.grad(each.square().sum(), mask)[0]
        for each in (
            of_gpt_oss(sinks_of(given["s_aux"]), given["query"], given["key"], given["value"], mask, scaling=0.5)[0],
            call(given | {"scaling": 0.5, "position_bias": None}),
        )
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert found[..., :4].all()
    assert not found[..., 4:].any()


def sinks_of(sinks: torch.Tensor) -> Layer:
    layer = Layer()
    layer.sinks = sinks
    return layer


def test_without_gradients_nothing_is_kept_and_the_output_is_the_same(requests: list[dict[str, Any]]) -> None:
    given = arrays(torch.float32)
    output = call(given)
    with torch.no_grad():
        assert call(given).grad_fn is None
        assert torch.equal(call(given), output)
    free = call({name: value.detach() for name, value in given.items()})
    assert not free.requires_grad
    assert torch.equal(free, output)
    assert not any("grad_output" in request for request in requests)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_have_the_types_of_their_tensors(dtype: torch.dtype) -> None:
    """And with `use(dtype="float64")` they are those of float64, rounded."""
    given = arrays(dtype)
    given.pop("position_bias")  # would be added to the mask in halves
    wide = {name: value.detach().double().requires_grad_() for name, value in given.items()}
    use(dtype="float64")
    outputs = [call(each) for each in (given, wide)]
    cotangent = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(7)).to(dtype)
    found, exact = (
        torch.autograd.grad(output, list(each.values()), cotangent.to(output.dtype))
        for output, each in zip(outputs, (given, wide), strict=True)
    )
    assert torch.equal(outputs[0], outputs[1].to(dtype))
    for one, other in zip(found[:3], exact[:3], strict=True):
        assert torch.equal(one, other.to(dtype))
    use()
    for one, other in zip(torch.autograd.grad(call(given), list(given.values()), cotangent), exact, strict=True):
        torch.testing.assert_close(one, other.to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_are_on_the_device_of_their_tensors(dtype: torch.dtype) -> None:
    given = arrays(dtype)
    there = {name: value.detach().cuda().requires_grad_() for name, value in given.items()}
    use(backend="numpy", device="cpu")
    for each in (given, there):
        call(each).square().sum().backward()
    for name, value in there.items():
        assert value.grad is not None
        assert value.grad.device.type == "cuda"
        torch.testing.assert_close(value.grad.cpu(), given[name].grad)


def test_a_second_derivative_is_an_error() -> None:
    """In every way to ask for it, also where `once_differentiable` of torch would return 0."""
    given = arrays()
    for output in (call(given).sum(), call(given).square().sum()):
        (slope,) = torch.autograd.grad(output, given["query"], create_graph=True)
        for other in ("query", "key", "s_aux"):
            with pytest.raises(UnsupportedCall, match="second derivatives"):
                torch.autograd.grad(slope.sum(), given[other], retain_graph=True)
        with pytest.raises(UnsupportedCall, match="second derivatives"):
            slope.sum().backward()


def test_a_loss_that_depends_on_weights_is_refused() -> None:
    model = tiny_model("llama", NAME)
    answer = model(input_ids=TOKENS, output_attentions=True)
    answer.logits.sum().backward(retain_graph=True)
    with pytest.raises(UnsupportedCall, match="attention weights"):
        (answer.logits.sum() + answer.attentions[0].square().sum()).backward()


def test_what_has_no_gradient_is_refused_before_the_backward_pass() -> None:
    learned = torch.tensor(2.0, requires_grad=True)
    with pytest.raises(UnsupportedCall, match="softcap requires grad"):
        call(arrays(), softcap=learned)
    with torch.no_grad():
        assert torch.equal(call(arrays(), softcap=learned), call(arrays(), softcap=2.0))


def test_dropout_of_attention_is_refused_where_a_model_trains() -> None:
    model = tiny_model("llama", NAME, attention_dropout=0.1).train()
    with pytest.raises(UnsupportedCall, match=r"dropout 0\.1; .* configuration to 0, or call model\.eval"):
        model(input_ids=TOKENS)
    model.eval()(input_ids=TOKENS, labels=TOKENS).loss.backward()


def test_tensors_that_changed_in_place_are_an_error() -> None:
    given = arrays()
    key = given["key"] * 1
    output = call(given | {"key": key})
    key.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def train_step(model: Any) -> torch.Tensor:
    return as_loss(model(input_ids=TOKENS, labels=TOKENS, attention_mask=padding("left")).loss)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(reentrant: bool, requests: list[dict[str, Any]]) -> None:
    model = tiny_model("llama", NAME).train()
    expected = parameter_gradients(model, train_step)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    requests.clear()
    found = parameter_gradients(model, train_step)
    assert [("grad_output" in request) for request in requests] == [False] * 2 + [False, True] * 2
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.slow
def test_a_compiled_model_trains() -> None:
    model = tiny_model("llama", NAME).train()
    assert_close(
        parameter_gradients(torch.compile(model, backend="eager"), train_step),
        {f"_orig_mod.{name}": each for name, each in parameter_gradients(model, train_step).items()},
    )


@pytest.mark.parametrize("implementation", ["eager", "sdpa", NAME])
def test_capture_sees_a_model_that_trains(implementation: str) -> None:
    """And changes none of its gradients."""
    model = tiny_model("llama", implementation).train()
    expected = parameter_gradients(model, train_step)
    with capture(rows=[-1, 4]) as captured:
        found = parameter_gradients(model, train_step)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
    model.set_attn_implementation("eager")
    with torch.no_grad():
        shown = model(input_ids=TOKENS, attention_mask=padding("left"), output_attentions=True).attentions
    assert len(captured.calls) == len(shown) == 2
    for layer, weights in enumerate(shown):
        np.testing.assert_allclose(captured[layer].attention_weights, weights[:, :, [9, 4]], rtol=0, atol=1e-5)
