"""The Open Inference Protocol over gRPC, in the event loop of HTTP and with its engine. Needs the extra grpc."""
