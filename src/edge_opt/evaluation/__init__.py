"""Published import path of the operator profile; the code is in `edge_opt.stream`."""
