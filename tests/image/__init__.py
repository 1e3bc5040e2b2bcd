"""The image as it runs in production: read-only, with neither root nor capabilities. `make image-test` runs this."""
