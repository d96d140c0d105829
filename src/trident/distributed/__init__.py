"""Work on several processes, on one machine or many."""
