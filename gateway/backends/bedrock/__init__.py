"""Amazon Bedrock as a backend: Converse and ConverseStream through boto3, in threads of its own."""
