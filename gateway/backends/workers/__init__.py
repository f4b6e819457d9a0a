"""Remote workers as one backend: a pool of servers that speak OpenAI's contract."""
