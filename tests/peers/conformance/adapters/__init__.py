"""Other libraries as implementations, each as its user would call it.

A field that a library has an argument for is passed on; for any other the case is not supported. Defects are not
worked around. What a library refuses with an error counts as not supported, too.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final, NamedTuple

from attention_service.conformance.target import Target


class Adapter(NamedTuple):
    """A library: what it is called, its package, and where the implementation is, below this package."""

    title: str
    package: str
    target: str

    @property
    def is_installed(self) -> bool:
        """True if its package can be imported."""
        return find_spec(self.package) is not None

    @property
    def version(self) -> str:
        """The version of its package."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return "not installed"

    def load(self) -> Target:
        """The implementation. Errors: ImportError."""
        module, _, name = self.target.partition(":")
        found: Target = getattr(import_module(f"{__name__}.{module}"), name)
        return found


ADAPTERS: Final = {
    "torch-sdpa": Adapter("torch SDPA", "torch", "torch_functions:scaled_dot_product"),
    "flex-attention": Adapter("torch FlexAttention", "torch", "flex:flex"),
    "torch-mha": Adapter("torch MultiheadAttention", "torch", "torch_functions:multihead"),
    "jax": Adapter("JAX", "jax", "jax_functions:dot_product"),
    "keras": Adapter("Keras layers", "keras", "keras_layers:multi_head"),
    "onnxruntime": Adapter("ONNX Runtime", "onnxruntime", "onnx_models:runtime"),
    "onnx": Adapter("ONNX reference", "onnx", "onnx_models:reference"),
    "transformers": Adapter("Hugging Face, eager", "transformers", "hugging_face:eager"),
}
