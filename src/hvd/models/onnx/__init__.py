"""Decoding on a CPU: graphs on ONNX Runtime, with attention and matrix products of our own."""
