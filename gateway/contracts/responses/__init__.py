"""OpenAI's Responses: the body, the answer and its stream."""
