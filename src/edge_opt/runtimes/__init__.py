"""Runtimes: export, conversion, agreement with the original, and the kernels that ran."""
