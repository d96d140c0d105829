"""Pages: what a run did, gathered, and shown on one self-contained HTML page."""
