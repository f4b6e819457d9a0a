"""The gateway as a Ray Serve application: ingress replicas in front of engine replicas.

Only ``router``, ``replicas``, ``application`` and what the command line calls import Ray; the rest is values
and decisions. Importing :mod:`gateway.app` imports none of it.
"""
