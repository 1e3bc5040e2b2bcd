"""The service asked by clients that nobody here wrote."""
