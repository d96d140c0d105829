"""Methods that classify all queries of a task together."""
