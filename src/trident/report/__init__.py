"""`trident report` and `trident compare`: what a run did, gathered, and shown on one self-contained page."""

from trident.report.comparison import Comparison, compare
from trident.report.content import Report, gather
from trident.report.page import check_extras, comparison_page, report_page

__all__ = ["Comparison", "Report", "check_extras", "compare", "comparison_page", "gather", "report_page"]
