"""The torch backend: the dense computation on any device of torch, and fused kernels."""
