"""Backends execute plans. base.py says what a backend is, registry.py which there are."""
