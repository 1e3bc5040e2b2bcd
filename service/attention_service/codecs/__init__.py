"""Wire formats: bytes in, values out, and back. One table, looked up exactly; no codec sees a request or does I/O."""
