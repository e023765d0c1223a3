"""Model files (.onnx, .tflite, .pt2): read, never executed."""
