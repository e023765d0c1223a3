"""`python -m edge_opt`."""

from edge_opt.cli import main

main()
