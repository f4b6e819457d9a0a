"""Sources of a model's files: a local folder, a model hub or S3; fetched once, into a cache.

Reading order: ``errors``, ``location`` (the forms of ``engine.model``), ``values`` (the port), ``selection``
(which files), ``part_file`` (resumption), ``checksum``, ``records``, ``s3_client``, ``s3_transfer``, ``s3``,
``hub``, ``progress``, and ``source``, which the composition root calls.

Nothing here runs on the event loop: ``source`` calls it from a thread and stops it through an event.
"""
