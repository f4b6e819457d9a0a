"""The rollout checklist (seed 000 §13) asked of a live gateway.

Reading order: ``facts`` (what is looked at), ``checks`` (what is made of it), ``gather`` (who asks).
"""
