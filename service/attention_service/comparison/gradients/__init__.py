"""The judge of gradients: which mistake did the backward pass of a kernel make."""
