"""Reports on BCQ checkpoints: contents, errors against a dense model, the HTML page; sweeps over methods and sizes."""

from __future__ import annotations

from .contents import DenseRow, Report, SourceFacts, WeightRow, kind_of, make_report

__all__ = ["DenseRow", "Report", "SourceFacts", "WeightRow", "kind_of", "make_report"]
