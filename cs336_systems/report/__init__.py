"""Records to tables, figures and the generated blocks of documents: `build_report(folder)` does it all."""

from cs336_systems.report.build import build_report, check_documents, update_documents

__all__ = ["build_report", "check_documents", "update_documents"]
