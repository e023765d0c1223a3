"""Datasets in four parts that share no sample: digits (bundled), MNIST and Fashion-MNIST (idx files), your own."""

from edge_opt.data.datasets import DATASETS, Splits, load_splits

__all__ = ["DATASETS", "Splits", "load_splits"]
