"""The documents of the leaderboard, made from its kept results: see README.md."""
