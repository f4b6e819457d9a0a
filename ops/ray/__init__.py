"""The gateway as a Ray Serve application: ingress replicas in front of engine replicas.

Only ``router``, ``replicas``, ``application`` and ``sluice ray`` import Ray; :mod:`gateway.app` imports none.
"""
