"""Admission control: which request may go to its backend now, and why not."""
