"""Trace a model: record its operators and their shapes without computing them."""

from edge_opt.trace.inputs import InputSpec
from edge_opt.trace.operators import clear_memo
from edge_opt.trace.tracer import trace, trace_in_separate_process

__all__ = ["InputSpec", "clear_memo", "trace", "trace_in_separate_process"]
