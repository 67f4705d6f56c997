"""Bytes in: OTLP over gRPC and HTTP, KV events over ZMQ, recorded files."""
