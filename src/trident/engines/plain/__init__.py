"""The plain engine: every method with torch's autograd, on any device."""
