"""Many methods, measured on the very same tasks and shown in one table.

`rows.toml` lists the methods, `rows.py` the tasks. `measuring.py` measures one row, and `results.jsonl` keeps the
result; the table, the document and the page are made from this file alone.
"""
