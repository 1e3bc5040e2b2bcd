"""What operators see of the service: metrics, logs, traces, request ids."""
