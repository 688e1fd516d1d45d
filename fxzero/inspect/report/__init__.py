"""An analysis as one page that opens offline: what goes into it, and how it becomes a file."""

from fxzero.inspect.report.data import report_data
from fxzero.inspect.report.page import data_of, page

__all__ = ["data_of", "page", "report_data"]
