"""Comparison with implementations that nobody here wrote. Runs in the environment of `make install-torch`."""
