"""Metrics, logs, traces, request ids."""
