"""Where a model's files come from: a local folder, a model hub, or S3; fetched into a cache, once.

Reading order: ``errors``, ``location`` (what ``engine.model`` may say), ``values`` (the port and what it
speaks of), ``selection`` (which files, small ones first), ``intervals`` and ``part_file`` (what makes a fetch
resumable), ``checksum``, ``records``, ``s3_client``, ``s3``, ``hub`` with its child process ``hub_child``,
``progress``, and ``source``, which the composition root calls.

Nothing here runs on the event loop: ``source`` calls it from a thread and stops it through an event.
"""
