"""The service receives requests from third-party clients."""
