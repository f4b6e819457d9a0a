"""Sources of a model's files: a local folder, a model hub or S3; each file is fetched once, into a cache."""
