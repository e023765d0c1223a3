"""What a classifier achieves and takes: the published `collect_metrics`, thin over `edge_opt.profile`."""

from edge_opt.metrics.collecting import Metrics, collect_metrics

__all__ = ["Metrics", "collect_metrics"]
