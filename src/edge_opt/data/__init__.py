"""Datasets in four parts that share no sample: digits (bundled), MNIST and Fashion-MNIST (idx files), your own."""

from edge_opt.data.datasets import DATASETS, load_splits
from edge_opt.data.sources import Splits

__all__ = ["DATASETS", "Splits", "load_splits"]
