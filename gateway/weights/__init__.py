"""Sources of a model's files: a local folder, a model hub or S3; fetched once, into a cache."""
