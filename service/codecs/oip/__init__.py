"""The Open Inference Protocol (v2), over HTTP and over gRPC."""
