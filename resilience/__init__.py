"""What happens when a backend fails: the closed set of failures, the guard, the fallback chain."""
