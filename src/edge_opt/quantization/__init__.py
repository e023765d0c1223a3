"""int8 and int4 on files and arrays: ranges, static, dynamic, weights alone, fake quantization, mixed precision."""
