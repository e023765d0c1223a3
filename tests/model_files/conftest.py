"""`.tflite` files of the tests are made with LiteRT, which requirements/dev.lock has for one Python alone."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("ai_edge_litert") else ["test_tflite_*.py"]
