"""The image runs as in production: read-only, without root and capabilities. `make image-test` runs these tests."""
