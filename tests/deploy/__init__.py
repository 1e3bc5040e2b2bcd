"""The files in deploy/, by the tools that read them. `make deploy-check` runs these tests."""
