"""Comparison with independent implementations. Runs in the environment of `make install-torch`."""
