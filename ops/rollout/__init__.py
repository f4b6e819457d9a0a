"""The rollout checklist, run against a live gateway: ``facts`` are gathered, ``checks`` judge them."""
