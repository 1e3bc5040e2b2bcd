"""Models of Hugging Face transformers: their attention by this service, and a look into the attention of any model.

    import attention_service.transformers
    model = AutoModel.from_pretrained(…, attn_implementation="attention-service")

- interface: the attention function and its gradients; importing this package registers it
- call: what a model asks for, as the fields of a request; refuses what has no field
- engine: where requests are computed
- recorder: capture(), with its arguments checked in arguments, the masks of every implementation in visible, the
  roles and labels of layers in labels, and the results in captured, which pages writes as one HTML file
"""

from __future__ import annotations

from attention_service.transformers.call import UnsupportedCall
from attention_service.transformers.captured import Captured, CapturedAttention
from attention_service.transformers.engine import ServiceFailed, use
from attention_service.transformers.interface import NAME, attention, register
from attention_service.transformers.recorder import capture

__all__ = ["NAME", "Captured", "CapturedAttention", "ServiceFailed", "UnsupportedCall", "attention", "capture", "use"]

register()
