"""Token budgets: what of a prompt is sent, counted exactly."""
