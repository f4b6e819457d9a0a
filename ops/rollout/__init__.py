"""The rollout checklist, run against a live gateway.

Reading order: ``facts`` (what is looked at), ``checks`` (what is made of it), ``gather`` (who asks).
"""
