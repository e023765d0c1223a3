"""The published home of the stream's limits; the code is in `edge_opt.stream`."""
