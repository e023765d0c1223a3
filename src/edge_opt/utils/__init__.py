"""Published import path of the limits of a stream; the code is in `edge_opt.stream`."""
