"""`python -m edge_opt.cli`."""

from edge_opt.cli import main

main()
