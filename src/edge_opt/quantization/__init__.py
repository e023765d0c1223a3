"""Quantization of files and arrays: ranges, static and dynamic int8, and int8 simulated in torch."""
