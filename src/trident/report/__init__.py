"""Self-contained HTML pages about runs."""
