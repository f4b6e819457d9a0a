"""`sluice serve --gpus`: a worker process for each GPU of one machine, and the gateway in front of them."""
