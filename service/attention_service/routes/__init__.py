"""The operations, one module per group."""
