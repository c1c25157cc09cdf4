"""The command line: one module a command. Engine, numba and ONNX Runtime are imported inside the commands."""
